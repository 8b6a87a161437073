//! Counts over the codes and scales of NVFP4 weights.

use model_files::{Tensors, f32s, raw};
use nvfp4_checkpoint::{Checkpoint, Dtype, Format, Usage};

#[test]
fn codes_scales_and_columns_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = Tensors::default();
    let module = "model.layers.0.mlp.down_proj";
    tensors.set_nvfp4(module, Format::ModelOpt, [8, 32], 1);
    // All values are 1 but one, which is 6. All scales are 1 but the last, which is 0.5.
    let (mut values, mut scales) = (vec![0x22; 128], vec![0x38; 16]);
    scales[15] = 0x30;
    values[4] = 0x27;
    tensors.set(format!("{module}.weight"), raw(Dtype::U8, &[8, 16], &values));
    tensors.set(format!("{module}.weight_scale"), raw(Dtype::F8_E4M3, &[8, 2], &scales));
    tensors.set("model.norm.weight", f32s(&[2], &[1.0, 1.0]));
    let path = tensors.write(&folder.path().join("m.safetensors"));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let [usage] = &Usage::of(&checkpoint, &|_| true, &|_| ()).unwrap()[..] else { panic!("one weight") };
    assert_eq!((&usage.module[..], usage.codes[2], usage.codes[7], usage.blocks()), (module, 255, 1, 16));
    let powers = usage.scales_by_power();
    assert_eq!((powers[9], powers[8], powers.iter().sum::<u64>()), (15, 1, 16));
    // Column 8 has one 6 and seven 1, the middle column eight 1.
    assert_eq!(usage.largest_column, 8);
    assert!((usage.column_ratio - f64::sqrt(43.0 / 8.0)).abs() < 1e-12, "{}", usage.column_ratio);
    assert!(Usage::of(&checkpoint, &|_| false, &|_| ()).unwrap().is_empty());
}
