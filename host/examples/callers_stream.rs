//! Launches on the caller's stream with the caller's pointers, like an engine whose tokens are on the GPU already.
//!
//! ```sh
//! cargo run --release -p nvfp4 --features cuda --example callers_stream
//! ```

use cuda_driver::cust::memory::{CopyDestination, DeviceBuffer};
use cuda_driver::cust::stream::{Stream, StreamFlags};
use nvfp4::backend::cuda::{Cuda, DeviceGroup};
use nvfp4::generate::{self, Generator};
use nvfp4::problem::{Group, Op, TokenDtype};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = match Cuda::open(0) {
        Ok(gpu) => gpu,
        Err(error) if error.is_no_device() => {
            println!("{error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let sizes = [Group { m: 5, n: 256, k: 512 }, Group { m: 0, n: 256, k: 512 }, Group { m: 70, n: 256, k: 512 }];
    let weights = generate::weights(Generator::Gaussian, Op::Gated, &sizes, 0)?;
    let mut layer = gpu.prepare_layer(&weights)?; // uploads the weights; once

    // The caller's own memory: packed values, scales in the blocked layout, room for the output.
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
    let (mut groups, mut memory, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
    for (tokens, sizes) in generate::activations(Generator::Gaussian, &sizes, 0)?.iter().zip(&sizes) {
        let values = DeviceBuffer::from_slice(tokens.values())?;
        let scales = DeviceBuffer::from_slice(&tokens.blocked_scales().into_bytes())?;
        let output = DeviceBuffer::<u16>::zeroed(sizes.m * sizes.n)?;
        groups.push(DeviceGroup {
            rows: tokens.rows(),
            values: values.as_device_ptr().as_raw(),
            scales: scales.as_device_ptr().as_raw(),
            global_scale: tokens.global_scale(),
            output: output.as_device_ptr().as_raw(),
        });
        memory.extend([values, scales]);
        outputs.push(output);
    }

    // SAFETY: the stream belongs to the device's primary context, which `prepare_layer` has made current. Every address
    // is a buffer of the size that `DeviceGroup` requires. All buffers live until the stream is synchronized below.
    unsafe { layer.launch(&groups, TokenDtype::F16, stream.as_inner())? };
    stream.synchronize()?;

    let mut first = vec![0_u16; sizes[0].n];
    outputs[0].index(..sizes[0].n).copy_to(&mut first)?;
    println!(
        "{} launches; C[0, 0..4] of the first expert: {:04x?}",
        nvfp4::backend::Layer::launches(&layer).unwrap_or(0),
        &first[..4]
    );
    drop(memory);
    Ok(())
}
