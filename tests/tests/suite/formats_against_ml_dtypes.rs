//! Formats, layouts, quantization and the oracle against values from third-party code: `data/make_reference.py`
//! computes `data/reference.json` with numpy and ml_dtypes. Everything is compared bit for bit.

use nvfp4::format::blocked::BlockedScales;
use nvfp4::format::{Matrix, e2m1, e4m3};
use nvfp4::oracle::Reference;
use nvfp4::problem::{Expert, Op, Step, TokenDtype, Weights};
use nvfp4::quantize::quantize;
use serde::Deserialize;

#[derive(Deserialize)]
struct Table {
    /// f32 bits of each code; null for NaN.
    e2m1_decoded: Vec<Option<u32>>,
    e4m3_decoded: Vec<Option<u32>>,
    /// f32 bits, with the code that they encode to.
    e2m1_encoded: Vec<(u32, u8)>,
    e4m3_encoded: Vec<(u32, u8)>,
    blocked: Vec<Blocked>,
    quantized: Quantized,
    gated: Gated,
}

#[derive(Deserialize)]
struct Blocked {
    rows: usize,
    columns: usize,
    linear: Hex,
    blocked: Hex,
}

#[derive(Deserialize)]
struct Quantized {
    rows: usize,
    k: usize,
    numbers: Vec<u32>,
    #[serde(flatten)]
    expected: Operand,
}

#[derive(Deserialize)]
struct Operand {
    values: Hex,
    scales: Hex,
    global: u32,
}

#[derive(Deserialize)]
struct Gated {
    m: usize,
    n: usize,
    k: usize,
    a: Operand,
    gate: Operand,
    up: Operand,
    /// f64 bits of both pre-activations of each element.
    pre: Vec<[u64; 2]>,
    f16: Vec<u16>,
    bf16: Vec<u16>,
}

/// Bytes written as hexadecimal digits.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct Hex(Vec<u8>);

impl TryFrom<String> for Hex {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16))
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl Operand {
    fn matrix(&self, rows: usize, k: usize) -> Matrix<'_> {
        Matrix::new(rows, k, &self.values.0[..], &self.scales.0[..], f32::from_bits(self.global)).unwrap()
    }
}

fn table() -> Table {
    serde_json::from_str(include_str!("../../data/reference.json")).unwrap()
}

fn check_decoded(decode: fn(u8) -> f32, expected: &[Option<u32>]) {
    for (code, &expected) in expected.iter().enumerate() {
        let got = decode(code as u8);
        match expected {
            Some(bits) => assert_eq!(got.to_bits(), bits, "code {code:#x}"),
            None => assert!(got.is_nan(), "code {code:#x}"),
        }
    }
}

#[test]
fn every_code_decodes_to_the_reference_number() {
    let table = table();
    assert_eq!((table.e2m1_decoded.len(), table.e4m3_decoded.len()), (16, 256));
    check_decoded(e2m1::decode, &table.e2m1_decoded);
    check_decoded(e4m3::decode, &table.e4m3_decoded);
}

#[test]
fn numbers_encode_to_the_reference_codes() {
    let table = table();
    for (encode, cases) in [(e2m1::encode as fn(f32) -> u8, table.e2m1_encoded), (e4m3::encode, table.e4m3_encoded)] {
        assert!(cases.len() > 400);
        for (bits, code) in cases {
            let number = f32::from_bits(bits);
            assert_eq!(encode(number), code, "{number:e}");
        }
    }
}

#[test]
fn blocked_scales_have_the_reference_layout() {
    for Blocked { rows, columns, linear, blocked } in table().blocked {
        let got = BlockedScales::from_linear(rows, columns, &linear.0);
        assert_eq!(got.bytes(), blocked.0, "{rows} x {columns}");
        assert_eq!(BlockedScales::new(rows, columns, &blocked.0[..]).unwrap().to_linear(), linear.0);
    }
}

#[test]
fn matrix_quantizes_to_the_reference_bytes() {
    let Quantized { rows, k, numbers, expected } = table().quantized;
    let numbers: Vec<f32> = numbers.into_iter().map(f32::from_bits).collect();
    assert_eq!(quantize(&numbers, rows, k).unwrap(), expected.matrix(rows, k));
}

#[test]
fn oracle_computes_the_reference_gated_product() {
    let Gated { m, n, k, a, gate, up, pre, f16, bf16 } = table().gated;
    let expert = Expert::Gated { gate: gate.matrix(n, k), up: up.matrix(n, k) };
    let weights = Weights::new(Op::Gated, vec![expert]).unwrap();
    for (out_dtype, expected) in [(TokenDtype::F16, f16), (TokenDtype::Bf16, bf16)] {
        let step = Step::new(&weights, vec![a.matrix(m, k)], out_dtype).unwrap();
        let reference = Reference::new(&weights, &step);
        let got = reference.pre_activations(0);
        for (at, pre) in pre.iter().enumerate() {
            assert_eq!([got[0][at].to_bits(), got[1][at].to_bits()], *pre, "element {at}");
        }
        assert_eq!(reference.output(&step).bits(), expected, "{}", out_dtype.name());
    }
}
