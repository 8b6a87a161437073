//! `tensormap.replace` and `tensormap.cp_fenceproxy` (PTX ISA, "Data Movement: tensormap.replace", "Parallel
//! Synchronization: tensormap.cp_fenceproxy"): every field of a map is replaced. "rank … must contain the desired
//! tensor rank minus 1", strides are in bytes, enumerations follow the tables of `.elemtype` and `.swizzle_mode`. A
//! copy through the edited map then reads the tensor that the fields describe.

use ptx_emulator::program::Program;
use serde_json::json;

use super::common::{HOPPER, INIT_BARRIER, await_phase, copy_out, module, noise, poison, program, words};
use super::tensor_copies::{MAP_ADDRESS, Tensor};

pub fn programs() -> Vec<Program> {
    // Map made by the host: another buffer, other sizes, another type, three dimensions.
    let made = Tensor {
        element: ("u8", 1),
        dims: vec![64, 4, 2],
        strides: vec![64, 256],
        shape: vec![16, 2, 1],
        element_strides: vec![1, 1, 1],
        at: vec![],
        swizzle: "none",
    };
    let wanted = Tensor {
        element: ("u16", 2),
        dims: vec![70, 21],
        strides: vec![160],
        shape: vec![64, 16],
        element_strides: vec![1, 2],
        at: vec![8, 3],
        swizzle: "128B",
    };
    let source = noise(61, 160 * 21 / 4);
    let tile = wanted.tile_bytes();
    let (moves, operand) = wanted.operand();
    let replace = |field: &str, bits: u32, value: String| {
        format!("@%p1 tensormap.replace.tile.{field}.shared::cta.b1024.b{bits} [%r4], {value};\n")
    };
    let edits = [
        replace("global_address", 64, "%d6".into()),
        replace("rank", 32, "1".into()),
        replace("box_dim", 32, "0, 64".into()),
        replace("box_dim", 32, "1, 16".into()),
        replace("global_dim", 32, "0, 70".into()),
        replace("global_dim", 32, "1, 21".into()),
        replace("global_stride", 64, "0, %d7".into()),
        replace("element_stride", 32, "0, 1".into()),
        replace("element_stride", 32, "1, 2".into()),
        replace("elemtype", 32, "1".into()),
        replace("interleave_layout", 32, "0".into()),
        replace("swizzle_mode", 32, "3".into()),
        replace("fill_mode", 32, "0".into()),
    ];
    let body = format!(
        "ld.param.u64 %d1, [out];\nld.param.u64 %d6, [src];\nld.param.u64 %d5, [room];\nmov.u64 %d7, 160;\n\
         mov.u32 %r2, tile;\nmov.u32 %r4, copy;\n{MAP_ADDRESS}{moves}\
         setp.lt.u32 %p2, %r1, 32;\nshl.b32 %r5, %r1, 2;\nadd.u32 %r6, %r4, %r5;\ncvt.u64.u32 %d8, %r5;\n\
         add.u64 %d9, %d3, %d8;\n@%p2 ld.b32 %r7, [%d9];\n@%p2 st.shared.b32 [%r6], %r7;\n{INIT_BARRIER}{}\
         bar.sync 0;\n@!%p2 bra COPIED;\n\
         tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d5], [%r4], 128;\n\
         COPIED:\nbar.sync 0;\nfence.proxy.tensormap::generic.acquire.gpu [%d5], 128;\nmov.u64 %d3, %d5;\n\
         @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {tile};\n\
         @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], {operand}, [%r3];\n\
         {}{}",
        edits.concat(),
        await_phase(0, "WAIT"),
        copy_out(tile, 128)
    );
    let bytes: Vec<u8> = source.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut want = vec![0; tile];
    for (to, from) in wanted.elements() {
        if let Some(from) = from {
            want[to..to + 2].copy_from_slice(&bytes[from..from + 2]);
        }
    }
    let declarations =
        ".shared .align 1024 .b8 tile[2048];\n.shared .align 128 .b8 copy[128];\n.shared .align 8 .b64 bar;";
    let parameters = ".param .u64 out, .param .u64 src, .param .u64 room, .param .align 64 .b8 map[128]";
    let arguments = json!([{"pointer": "out"}, {"pointer": "src"}, {"pointer": "room"}, made.map("other")]);
    // A map of zeros can be filled in too.
    let zeroed = body.replace("@%p2 ld.b32 %r7, [%d9];", "mov.b32 %r7, 0;");
    let bodies = [("tensormap.replace of every field", &body), ("tensormap.replace on zeros", &zeroed)];
    let edited = |(what, body): (&str, &String)| {
        let mut program = program(
            what,
            module(HOPPER, declarations, parameters, body),
            json!({"block": [128, 1, 1], "args": arguments,
               "buffers": {"out": poison(tile / 4), "src": {"u32": &source}, "room": {"bytes": 128},
                           "other": {"bytes": 512}}}),
            &[("out", words(&want))],
        );
        program.outcome.opaque = vec!["room".into()];
        program
    };
    bodies.map(edited).into()
}
