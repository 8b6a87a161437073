//! Opens a checkpoint, and finds and checks the experts of a layer, which reads their scales. A second measurement also
//! converts them to the CPU backend's layout, which reads everything. The file is in the page cache. Rates are of the
//! layer's bytes.

mod common;

use std::path::Path;

use criterion::{SamplingMode, Throughput};
use nvfp4::backend::Backend;
use nvfp4::backend::cpu::Cpu;
use nvfp4::checkpoint::{Checkpoint, Dtype, Format, TensorWriter};
use nvfp4::generate::{self, Generator};
use nvfp4::problem::{Op, Weights};
use nvfp4::shape;

/// Writes weights in ModelOpt's format, as layer 0. Returns the bytes of values and scales.
fn write(path: &Path, weights: &Weights<'_>) -> Result<u64, nvfp4::Error> {
    let format = Format::ModelOpt;
    let matrices: Vec<_> = weights
        .experts()
        .iter()
        .enumerate()
        .flat_map(|(index, expert)| {
            ["gate_proj", "up_proj"]
                .map(|name| format!("model.layers.0.mlp.experts.{index}.{name}"))
                .into_iter()
                .zip(expert.projections())
        })
        .collect();
    let tensors = matrices.iter().flat_map(|(module, matrix)| {
        let (n, k) = (matrix.rows(), matrix.k());
        [
            (format!("{module}{}", format.values()), Dtype::U8, vec![n, k / 2]),
            (format!("{module}{}", format.scales()), Dtype::F8_E4M3, vec![n, k / 16]),
            (format!("{module}{}", format.global()), Dtype::F32, vec![]),
        ]
    });
    let mut writer = TensorWriter::create(path, None, tensors.collect())?;
    let mut bytes = 0;
    for (module, matrix) in &matrices {
        writer.write(&format!("{module}{}", format.values()), matrix.values())?;
        writer.write(&format!("{module}{}", format.scales()), matrix.scales())?;
        writer.write(&format!("{module}{}", format.global()), &matrix.global_scale().to_le_bytes())?;
        bytes += matrix.values().len() + matrix.scales().len();
    }
    writer.finish()?;
    Ok(bytes as u64)
}

fn main() {
    let folder = tempfile::tempdir().expect("a folder for the checkpoint");
    let path = folder.path().join("model.safetensors");
    let shape = shape::find("decode-1").expect("a built-in shape");
    let weights = generate::weights(Generator::PublicDual, shape.op, &shape.groups, 1).expect("a valid shape");
    let bytes = write(&path, &weights).expect("room for the checkpoint");

    let checkpoint = Checkpoint::open(&path).expect("the file was written above");
    let layer = checkpoint.layer(0, Op::Gated).expect("the layer was written above");
    let pairs = layer.weights.experts().iter().zip(weights.experts());
    assert!(pairs.flat_map(|(read, made)| read.projections().zip(made.projections())).all(|(read, made)| read == made));

    let mut criterion = common::criterion();
    let mut group = criterion.benchmark_group("checkpoint");
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::BytesDecimal(bytes));
    let open = || Checkpoint::open(&path).expect("the file was opened above");
    group.bench_function("open, find and check a layer", |bencher| {
        bencher.iter(|| open().layer(0, Op::Gated).map(|layer| layer.input_scales.len()));
    });
    group.bench_function("and prepare it for the CPU", |bencher| {
        bencher.iter(|| {
            let checkpoint = open();
            let layer = checkpoint.layer(0, Op::Gated).expect("the layer was read above");
            Cpu::new().prepare(&layer.weights).map(|prepared| prepared.kernel().len())
        });
    });
    group.finish();
    criterion.final_summary();
}
