//! Tests of layers that share a workspace, and of packing on the device.

use bytemuck::Zeroable;
use kernels_gpu::layer::moe_pack::abi::{Pack, PackNvfp4};
use kernels_gpu::nvfp4_rows::{value_bytes, weight_scale_bytes};
use kernels_gpu::units::matrix_bytes;

use super::*;
use crate::backend::emulated::{Options, Schedule};
use crate::format::Matrix;
use crate::generate::Generator;
use crate::moe::generate::{self, Routing};
use crate::moe::{ExpertTransforms, LayerShape, shape};
use crate::problem::{TokenDtype, TokenFormat};
use crate::transform::TokenTransform;
use nvfp4_kernels::Refused;
use nvfp4_kernels::launch::output_code;
use nvfp4_kernels::layer::moe_pack::MoePack;
use nvfp4_kernels::layer::moe_pack::row_order::RowOrder;
use nvfp4_kernels::moe::operand_type;

fn hopper(schedule: Schedule) -> Emulated {
    Emulated::new("sm_90a", Options { schedule, sms: Some(3), ..Options::default() }).unwrap()
}

fn layer_shape(text: &str) -> LayerShape {
    shape::parse(text).unwrap().remove(0)
}

#[test]
fn transforms_inside_experts_are_refused_with_a_remedy() {
    let shape = layer_shape(r#"{"hidden": 32, "intermediate": 16, "experts": 2, "top_k": 1, "tokens": 1}"#);
    let weights = generate::weights(&shape, Generator::Gaussian, TokenDtype::Bf16, 1, &|| ()).unwrap();
    let down = Some(TokenTransform::sylvester(16));
    let transforms = vec![ExpertTransforms::default(), ExpertTransforms { gate_up: None, down }];
    let weights = weights.with_transforms(transforms).unwrap();
    let error = EmulatedMoeLayer::new(hopper(Schedule::Fair), &weights).map(|_| ()).unwrap_err();
    assert_eq!(error.code(), "not-computed");
    let error = error.to_string();
    assert!(error.contains("does not change tokens inside of experts") && error.contains("use the CPU"), "{error}");
}

#[test]
fn layers_with_different_routing_share_a_workspace() {
    // The second layer has different lists, and a shared expert, whose rows are in parts that the first layer lacks.
    let shapes = [
        layer_shape(r#"{"hidden": 96, "intermediate": 80, "experts": 4, "top_k": 2, "tokens": 21}"#),
        layer_shape(
            r#"{"hidden": 96, "intermediate": 48, "experts": 7, "top_k": 2, "shared_intermediate": 32, "tokens": 21}"#,
        ),
    ];
    let dtype = TokenDtype::Bf16;
    let weights = [0, 1].map(|i| generate::weights(&shapes[i], Generator::Gaussian, dtype, i as u64, &|| ()).unwrap());
    let steps = [0, 1].map(|i| {
        let inputs = generate::inputs(&shapes[i], Generator::Gaussian, Routing::Zipf, dtype, 21, i as u64).unwrap();
        MoeStep::new(&weights[i], inputs).unwrap()
    });
    for schedule in [Schedule::Fair, Schedule::Worst, Schedule::Seed(3)] {
        let gpu = hopper(schedule);
        let kernels = gpu.moe_kernels();
        let alone = [0, 1].map(|i| {
            let mut output = MoeOutput::with_stages(&steps[i]);
            EmulatedMoeLayer::new(gpu.clone(), &weights[i]).unwrap().execute(&steps[i], &mut output).unwrap();
            output.hidden
        });

        let mut device = gpu.memory();
        let mut keep = Vec::new();
        // Each part has the larger of the two layers' sizes.
        let [first, second] = [0, 1].map(|i| PlacedWorkspace::new(&mut gpu.memory(), &weights[i].sizes(), 21).parts);
        let most = |part: usize| second[part].bytes.max(first.get(part).map_or(0, |part| part.bytes));
        let parts: Vec<_> = (0..second.len()).map(|part| device.allocate(most(part))).collect();
        let workspace = PlacedWorkspace { parts, tokens: 21 };
        let layers = weights.each_ref().map(|weights| place(&mut device, weights));
        for round in 0..2 {
            let placed = [0, 1].map(|i| PlacedStep::new(&mut device, &steps[i], &MoeOutput::new(&steps[i]), &mut keep));
            for i in 0..2 {
                let (sizes, arguments) = (weights[i].sizes(), placed[i].arguments);
                let workspace = workspace.of(&sizes, 21);
                for launch in moe::launches(&layers[i], &arguments, &workspace, &kernels, gpu.sms).unwrap() {
                    gpu.launch(&mut device, &launch, &mut keep).unwrap();
                }
            }
            let found = placed.map(|step| device.download::<u16>(step.output));
            assert!(found == alone, "{schedule}: round {round}");
        }
    }
}

#[test]
fn device_and_host_pack_nvfp4_weights_alike() {
    const MATRICES: usize = 2;
    let gpu = hopper(Schedule::Fair);
    for (rows, k) in [(16, 16), (144, 352), (96, 720), (272, 48), (16, 2112)] {
        let values: Vec<u8> = (0..MATRICES * rows * k / 2).map(|i| (i * 97 + i / 251) as u8).collect();
        let scales: Vec<u8> = (0..MATRICES * rows * k / 16).map(|i| (i * 31 % 127) as u8).collect();
        let matrices = values.chunks(rows * k / 2).zip(scales.chunks(rows * k / 16));
        let matrices: Vec<_> = matrices.map(|(v, s)| Matrix::new(rows, k, v, s, 1.0).unwrap()).collect();
        let [values_of, scales_of] = [value_bytes(rows as u64, k as u32), weight_scale_bytes(rows as u32, k as u32)];
        let mut device = gpu.memory();
        let of_host = pack_nvfp4(matrices.iter());
        // Row padding is not written.
        let to = device.upload(&vec![0u8; of_host.len()]);
        let mut wrong = scales.clone();
        (wrong[3], wrong[rows * k / 16 + 1]) = (0x80, 0x7F);
        for (scales, first_wrong) in [(&scales, u64::MAX), (&wrong, 3)] {
            if scales.len() < 4 {
                continue;
            }
            let invalid = device.upload(&[u64::MAX]);
            let launch = MoePack.launch_nvfp4(PackNvfp4 {
                values: device.upload(&values).address,
                values_stride: (rows * k / 2) as u64,
                scales: device.upload(scales).address,
                scales_stride: (rows * k / 16) as u64,
                packed_values: to.address,
                packed_values_stride: values_of,
                packed_scales: to.address + MATRICES as u64 * values_of,
                packed_scales_stride: scales_of,
                invalid: invalid.address,
                matrices: MATRICES as u32,
                rows: rows as u32,
                k: k as u32,
                unused: 0,
            });
            gpu.launch(&mut device, &launch.unwrap(), &mut Vec::new()).unwrap();
            assert_eq!(device.download::<u64>(invalid), [first_wrong]);
            assert!(first_wrong == 3 || device.download::<u8>(to) == of_host, "{rows}×{k}");
        }
    }
}

#[test]
fn device_and_host_pack_units_alike() {
    const MATRICES: usize = 2;
    let gpu = hopper(Schedule::Fair);
    for (rows, k) in [(16, 16), (144, 352), (96, 720), (272, 48), (128, 256)] {
        let values: Vec<u8> = (0..MATRICES * rows * k / 2).map(|i| (i * 97 + i / 251) as u8).collect();
        let scales: Vec<u8> = (0..MATRICES * rows * k / 16).map(|i| (i * 31 % 127) as u8).collect();
        let matrices = values.chunks(rows * k / 2).zip(scales.chunks(rows * k / 16));
        let matrices: Vec<_> = matrices.map(|(v, s)| Matrix::new(rows, k, v, s, 1.0).unwrap()).collect();
        for (order, dtype) in
            [(RowOrder::OfK, TokenDtype::Bf16), (RowOrder::OfK, TokenDtype::F16), (RowOrder::Kept, TokenDtype::Bf16)]
        {
            let mut device = gpu.memory();
            let bytes = matrix_bytes(rows as u32, k as u32);
            let to = device.allocate(MATRICES as u64 * bytes);
            let launch = MoePack.launch(Pack {
                values: device.upload(&values).address,
                values_stride: (rows * k / 2) as u64,
                scales: device.upload(&scales).address,
                scales_stride: (rows * k / 16) as u64,
                units: to.address,
                units_stride: bytes,
                invalid: device.upload(&[u64::MAX]).address,
                matrices: MATRICES as u32,
                rows: rows as u32,
                k: k as u32,
                ordered_rows: (order == RowOrder::OfK).into(),
                operand_type: output_code(dtype),
                ..Pack::zeroed()
            });
            gpu.launch(&mut device, &launch.unwrap(), &mut Vec::new()).unwrap();
            let of_host: Vec<u8> =
                matrices.iter().flat_map(|matrix| pack(matrix, order, operand_type(dtype))).collect();
            assert!(device.download::<u8>(to) == of_host, "{rows}×{k} {order:?} {dtype:?}");
        }
    }
}

/// An instance that failed a self-test is replaced by one with other tiles, for which the lists and the workspace have
/// room.
#[test]
fn bits_are_the_same_without_any_instance() {
    for (arch, formats) in [
        ("sm_90a", &[TokenFormat::Bits16, TokenFormat::Fp8][..]),
        ("sm_100f", &[TokenFormat::Nvfp4]),
        ("sm_120f", &[TokenFormat::Bits16, TokenFormat::Nvfp4]),
        ("sm_80", &[TokenFormat::Bits16]),
    ] {
        let gpu = Emulated::new(arch, Options { sms: Some(3), ..Options::default() }).unwrap();
        for (&format, tokens) in formats.iter().flat_map(|format| [5, 40, 130].map(|tokens| (format, tokens))) {
            let shape = r#"{"hidden": 208, "intermediate": 176, "experts": 2, "top_k": 1, "shared_intermediate": 96, "tokens": 1}"#;
            let shape = layer_shape(shape).with_token_format(format);
            let weights = generate::weights(&shape, Generator::Gaussian, TokenDtype::Bf16, 1, &|| ()).unwrap();
            let inputs =
                generate::inputs(&shape, Generator::Gaussian, Routing::Uniform, TokenDtype::Bf16, tokens, 1).unwrap();
            let step = MoeStep::new(&weights, inputs).unwrap();
            let run = |refused: &[&str]| {
                let mut layer = EmulatedMoeLayer::new(gpu.clone(), &weights).unwrap();
                let refused = refused.iter().map(|entry| ((*entry).to_owned(), "it hung".to_owned()));
                layer.kernels = layer.kernels.without(Refused::new(refused));
                let entries = moe::multiplying_entries(&weights.sizes(), tokens, &layer.kernels, gpu.sms)?;
                let mut output = MoeOutput::new(&step);
                layer.execute(&step, &mut output).map(|_| (entries, output.hidden))
            };
            let (entries, expected) = run(&[]).unwrap();
            for refused in entries {
                let (entries, found) = run(&[refused]).unwrap();
                assert!(
                    !entries.contains(&refused) && found == expected,
                    "{tokens} tokens without {refused}: {entries:?}"
                );
            }
        }
    }
}
