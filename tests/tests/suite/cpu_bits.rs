//! Compares the CPU backend's outputs with recorded hashes, bit for bit: `tests/data/cpu_bits.txt` covers every
//! operation, token type and token format. Every instruction set of this machine must give the recorded bits. `cargo
//! xtask bless` renews the file.

use std::fmt::Write as _;

use nvfp4::backend::{
    Backend,
    cpu::{Cpu, Isa},
};
use nvfp4::generate::Generator;
use nvfp4::linear::{LinearOutput, LinearStep};
use nvfp4::moe::MoeOutput;
use nvfp4::problem::{Op, TokenFormat};
use nvfp4_tests::{Case, groups, inputs, linear, moe};

const RECORDED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/cpu_bits.txt");

/// 64-bit FNV-1a.
fn hash(numbers: &[u16]) -> u64 {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Returns one line per operation: its name and the hash of its output.
fn lines(cpu: &Cpu) -> String {
    let mut lines = String::new();
    for (op, name) in [(Op::Gated, "gated"), (Op::Plain, "plain")] {
        for dtype in moe::DTYPES {
            let sizes = groups(&[(3, 72, 96), (0, 8, 32), (70, 136, 272), (9, 40, 64), (1, 264, 1040)]);
            let inputs = inputs(Generator::Gaussian, op, &sizes, 1);
            let case = Case::new(&inputs, dtype);
            let output = case.run(cpu, case.prepare(cpu).as_mut());
            writeln!(lines, "{name} {} {:016x}", dtype.name(), hash(output.bits())).unwrap();
        }
    }
    for format in TokenFormat::ALL {
        for dtype in moe::DTYPES {
            for tokens in [1, 5, 70] {
                let weights = linear::weights(272, 1040, dtype).with_token_format(format);
                let step = LinearStep::new(&weights, linear::inputs(&weights, tokens)).unwrap();
                let mut output = LinearOutput::new(&step);
                cpu.prepare_linear(&weights).unwrap().execute(&step, &mut output).unwrap();
                let (name, hash) = (format.name(), hash(&output.out));
                writeln!(lines, "linear {name} {} {tokens} {hash:016x}", dtype.name()).unwrap();

                let shape = moe::shape(272, 144, 7, 3).with_token_format(format);
                let weights = moe::weights(&shape, dtype);
                let step = moe::step(&weights, moe::inputs(&shape, dtype, tokens));
                let mut output = MoeOutput::new(&step);
                cpu.prepare_moe(&weights).unwrap().execute(&step, &mut output).unwrap();
                let hash = self::hash(&output.hidden);
                writeln!(lines, "moe {name} {} {tokens} {hash:016x}", dtype.name()).unwrap();
            }
        }
    }
    lines
}

#[test]
fn every_instruction_set_gives_the_recorded_bits() {
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(RECORDED, lines(&Cpu::new())).unwrap();
    }
    let recorded = std::fs::read_to_string(RECORDED).unwrap();
    for cpu in Isa::ALL.into_iter().filter_map(|isa| Cpu::with(isa).ok()) {
        assert_eq!(lines(&cpu), recorded, "{}", cpu.isa().name());
    }
}
