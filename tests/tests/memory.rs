//! Model files may be larger than memory: weights stay in the mapped file, and a conversion holds only a part of a
//! tensor at a time.

use model_files::{Tensors, raw};
use nvfp4::checkpoint::{Checkpoint, Conversion, Dtype, Format, Options};
use nvfp4::problem::Op;
use nvfp4_tests::allocation::{self, Counting};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The file has only one test, because the allocator counts the bytes of all threads.
#[test]
fn model_is_never_entirely_in_memory() {
    const EXPERTS: usize = 2;
    const SIZES: [usize; 2] = [4096, 4096];
    /// Bytes for names, headers, tables and the threads of the pool.
    const OVERHEAD: usize = 256 << 10;
    /// Bytes that a thread converts at a time: half a million numbers in NVFP4.
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
    assert!(peak < 2 * threads * PART + OVERHEAD, "the conversion used {peak} bytes, with parts of {PART} bytes");

    let peak = allocation::peak(|| {
        let checkpoint = Checkpoint::open(&output).unwrap();
        assert_eq!(checkpoint.layer(0, Op::Gated).unwrap().weights.experts().len(), EXPERTS);
    });
    assert!(peak < OVERHEAD, "reading a layer used {peak} bytes, expected less than {OVERHEAD}");
}
