//! Model files larger than memory can be used: weights stay in the mapped file, and a conversion holds a part of a tensor at
//! a time, whatever its size.

use model_files::{Tensors, raw};
use nvfp4::checkpoint::{Checkpoint, Conversion, Dtype, Format, Options};
use nvfp4::problem::Op;
use nvfp4_tests::allocation::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, since the allocator counts for all threads.
#[test]
fn a_model_is_never_in_memory_as_a_whole() {
    const EXPERTS: usize = 2;
    const SIZES: [usize; 2] = [4096, 4096];
    /// For names, headers, tables, and the threads of the pool.
    const OVERHEAD: usize = 256 << 10;
    /// What a thread converts at a time: half a million numbers, as NVFP4.
    const PART: usize = (1 << 19) * 9 / 16;
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in.safetensors", "out.safetensors"].map(|name| folder.path().join(name));
    let mut tensors = Tensors::default();
    for expert in 0..EXPERTS {
        for name in ["gate_proj", "up_proj"] {
            let name = format!("model.layers.0.mlp.experts.{expert}.{name}.weight");
            tensors.set(name, raw(Dtype::BF16, &SIZES, &vec![0x3F; 2 * SIZES[0] * SIZES[1]]));
        }
    }
    tensors.write(&input);
    drop(tensors);
    let threads = std::thread::available_parallelism().unwrap().get();

    let peak = allocation::peak(|| {
        let checkpoint = Checkpoint::open(&input).unwrap();
        Conversion::new(&checkpoint, &Options::new(Format::ModelOpt, &|_| true))
            .unwrap()
            .write(&output, |_| ())
            .unwrap();
    });
    assert!(peak < 2 * threads * PART + OVERHEAD, "{peak} bytes for parts of {PART}");

    let peak = allocation::peak(|| {
        let checkpoint = Checkpoint::open(&output).unwrap();
        assert_eq!(checkpoint.layer(0, Op::Gated).unwrap().weights.experts().len(), EXPERTS);
    });
    assert!(peak < OVERHEAD, "{peak} bytes to read a layer");
}
