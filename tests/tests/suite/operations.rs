//! Computes every cell of the book's table of operations. `cargo xtask bless` renews the table.

use nvfp4::Error;
use nvfp4::backend::emulated::{Emulated, Options, Schedule, arches};
use nvfp4::backend::{Backend, cpu::Cpu};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Op, TokenDtype, TokenFormat};
use nvfp4::router::{self, Logits, Router, Scoring};
use nvfp4_tests::{Case, groups, inputs, linear, moe};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/book/src/concepts/kernels.md");
const MARKS: [&str; 2] = ["<!-- begin operations -->\n", "<!-- end operations -->\n"];

/// A row of the table: operation, tokens, and a function that returns whether a backend supports the operation. The
/// function panics if the backend's output is wrong.
type Row = (&'static str, String, Box<dyn Fn(&dyn Backend) -> bool>);

fn rows() -> Vec<Row> {
    let ops = [(Op::Gated, "grouped GEMM, gated"), (Op::Plain, "grouped GEMM, plain")];
    let grouped =
        ops.map(|(op, name)| -> Row { (name, "NVFP4".into(), Box::new(move |gpu| computes_groups(gpu, op))) });
    let tokens = || TokenFormat::ALL.into_iter().flat_map(|format| moe::DTYPES.map(|dtype| (format, dtype)));
    let linear = tokens().map(|(format, dtype)| -> Row {
        ("linear layer", words(format, dtype), Box::new(move |gpu| computes_linear(gpu, format, dtype)))
    });
    let moe = tokens().map(|(format, dtype)| -> Row {
        ("MoE layer", words(format, dtype), Box::new(move |gpu| computes_moe(gpu, format, dtype)))
    });
    let router: Row = ("router", "logits of f32, bf16, f16".into(), Box::new(computes_router));
    grouped.into_iter().chain(linear).chain(moe).chain([router]).collect()
}

/// Describes the token type and the token format.
fn words(format: TokenFormat, dtype: TokenDtype) -> String {
    match format {
        TokenFormat::Bits16 => dtype.name().into(),
        other => format!("{}, multiplied as {}", dtype.name(), other.name()),
    }
}

/// Returns the prepared layer. `None`: the backend has no kernel for it.
fn prepared<T>(layer: Result<T, Error>) -> Option<T> {
    match layer {
        Ok(layer) => Some(layer),
        Err(Error::NotComputed(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

fn computes_groups(backend: &dyn Backend, op: Op) -> bool {
    let inputs = inputs(Generator::Gaussian, op, &groups(&[(3, 72, 96), (0, 8, 32), (9, 40, 64)]), 1);
    let case = Case::new(&inputs, TokenDtype::F16);
    case.verified(backend, case.prepare(backend).as_mut(), |_| Tolerance::of(TokenDtype::F16));
    true
}

fn computes_linear(backend: &dyn Backend, format: TokenFormat, dtype: TokenDtype) -> bool {
    let weights = linear::weights(80, 176, dtype).with_token_format(format);
    let step = nvfp4::linear::LinearStep::new(&weights, linear::inputs(&weights, 5)).expect("inputs of the layer");
    let layer = prepared(backend.prepare_linear(&weights));
    layer.map(|mut layer| linear::verified(layer.as_mut(), &weights, &step)).is_some()
}

fn computes_moe(backend: &dyn Backend, format: TokenFormat, dtype: TokenDtype) -> bool {
    let layer = moe::shape(80, 48, 3, 2).with_token_format(format);
    let weights = moe::weights(&layer, dtype);
    let step = moe::step(&weights, moe::inputs(&layer, dtype, 5));
    let layer = prepared(backend.prepare_moe(&weights));
    layer.map(|mut layer| moe::verified(layer.as_mut(), &weights, &step)).is_some()
}

fn computes_router(backend: &dyn Backend) -> bool {
    let router = Router::new(20, 3, Scoring::Softmax { renormalize: true }).expect("valid sizes");
    let numbers: Vec<f32> = (0..100).map(|i| (i * 37 % 41) as f32 / 8.0).collect();
    let bits = |dtype: TokenDtype| numbers.iter().map(|&number| dtype.round_f32(number)).collect::<Vec<_>>();
    let [bf16, f16] = [TokenDtype::Bf16, TokenDtype::F16].map(bits);
    for logits in [Logits::F32(numbers.as_slice().into()), Logits::Bf16(bf16.into()), Logits::F16(f16.into())] {
        let routes = backend.route(&router, &logits).expect("every device has this kernel");
        assert!(
            router::compare::compare(&router, &logits, &routes)
                .expect("logits with the router's number of experts")
                .is_none()
        );
    }
    true
}

fn table() -> String {
    let gpu = |arch| Emulated::new(arch, Options { schedule: Schedule::Fair, sms: Some(3), sanitize: true });
    let gpus = arches()
        .into_iter()
        .map(|arch| (arch, Box::new(gpu(arch).expect("an architecture with kernels")) as Box<dyn Backend>));
    let backends: Vec<_> = [("CPU", Box::new(Cpu::new()) as _)].into_iter().chain(gpus).collect();
    let names: Vec<_> = backends.iter().map(|(name, _)| *name).collect();
    let mut table =
        format!("| operation | tokens | {} |\n|---|---|{}\n", names.join(" | "), ":-:|".repeat(names.len()));
    for (operation, tokens, computes) in rows() {
        let cells = backends.iter().map(|(_, backend)| if computes(backend.as_ref()) { "yes" } else { "–" });
        let cells: Vec<_> = cells.collect();
        table += &format!("| {operation} | {tokens} | {} |\n", cells.join(" | "));
    }
    table
}

#[test]
fn table_of_the_book_matches_the_backends() {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let (before, rest) = page.split_once(MARKS[0]).expect("a mark before the table");
    let (found, after) = rest.split_once(MARKS[1]).expect("a mark after the table");
    let table = table();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(PAGE, [before, MARKS[0], &table, MARKS[1], after].concat()).unwrap();
    } else {
        assert_eq!(found, table, "the book's table is out of date; run `cargo xtask bless`");
    }
}
