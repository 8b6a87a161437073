//! Steps computed on the CPU and compared in stages, and outputs that are damaged on purpose.

use crate::backend::{Backend, cpu::Cpu};
use crate::bias::Bias;
use crate::format::Matrix;
use crate::fp4::InputScales;
use crate::generate::Generator;
use crate::moe::compare::{MoeComparison, Stage, compare, compare_sample, elements};
use crate::moe::generate::{self, Routing};
use crate::moe::{
    Activation, Biases, ExpertTransforms, LayerShape, MoeExpert, MoeInputs, MoeOutput, MoeStep, MoeWeights, shape,
};
use crate::problem::{TokenDtype, TokenFormat};
use crate::quantized::QuantizedRows;
use crate::transform::TokenTransform;

const DTYPES: [TokenDtype; 2] = [TokenDtype::F16, TokenDtype::Bf16];

fn layer(name: &str) -> LayerShape {
    shape::find(name).unwrap()
}

/// The layer in every token format.
fn in_every_format(shape: &LayerShape) -> [LayerShape; 3] {
    TokenFormat::ALL.map(|format| shape.clone().with_token_format(format))
}

fn weights(shape: &LayerShape, generator: Generator, dtype: TokenDtype) -> MoeWeights<'static> {
    generate::weights(shape, generator, dtype, 1, &|| ()).unwrap()
}

fn inputs(shape: &LayerShape, generator: Generator, dtype: TokenDtype) -> MoeInputs<'static> {
    generate::inputs(shape, generator, Routing::Zipf, dtype, shape.tokens, 2).unwrap()
}

fn run(weights: &MoeWeights<'_>, step: &MoeStep<'_>) -> MoeOutput {
    let mut output = MoeOutput::with_stages(step);
    Cpu::new().prepare_moe(weights).unwrap().execute(step, &mut output).unwrap();
    output
}

/// Runs a step whose output must be right. Returns the output and the comparison.
fn right(weights: &MoeWeights<'_>, inputs: MoeInputs<'_>) -> (MoeOutput, MoeComparison) {
    let step = MoeStep::new(weights, inputs).unwrap();
    let output = run(weights, &step);
    let found = compare(weights, &step, &output);
    assert!(found.passed(), "{}", found.first().unwrap());
    assert_eq!(found.checked(), elements(&step));
    (output, found)
}

#[test]
fn the_cpu_computes_every_small_layer_within_the_bounds() {
    let shapes = shape::builtin().iter().filter(|shape| shape.name.starts_with("layer-test-"));
    for shape in shapes.flat_map(in_every_format) {
        for (dtype, generator) in
            DTYPES.into_iter().flat_map(|dtype| Generator::ALL.map(|generator| (dtype, generator)))
        {
            println!("{} {} {} {}", shape.name, shape.token_format.name(), dtype.name(), generator.name());
            let (_, found) = right(&weights(&shape, generator, dtype), inputs(&shape, generator, dtype));
            assert_eq!(found.unbounded(), 0, "every element must have a bound");
        }
    }
}

/// Transforms of all experts of a layer.
fn transforms_of(
    weights: &MoeWeights<'_>,
    of: impl Fn(usize, usize) -> [Option<TokenTransform>; 2],
) -> Vec<ExpertTransforms> {
    let experts = weights.experts().iter().chain(weights.shared()).enumerate();
    let transforms = experts.map(|(index, expert)| {
        let [gate_up, down] = of(index, expert.down.k());
        ExpertTransforms { gate_up, down }
    });
    transforms.collect()
}

#[test]
fn transforms_precede_each_product_and_its_rounding() {
    for shape in in_every_format(&layer("layer-test-7")) {
        let dtype = TokenDtype::Bf16;
        let plain = weights(&shape, Generator::Gaussian, dtype);
        let hidden = plain.sizes().hidden;
        let factors = |count: usize, expert: usize| -> Vec<f32> {
            (0..count).map(|column| 0.5 + ((column * 7 + expert) % 13) as f32 / 8.0).collect()
        };
        let rotated = |expert: usize| {
            let matrix = (0..256).map(|i| ((i * 5 + expert) % 17) as f64 / 16.0 - 0.5).collect();
            TokenTransform::of_matrix(16, matrix)
        };
        let transforms = transforms_of(&plain, |expert, width| match expert % 3 {
            0 => [Some(TokenTransform::of_factors(&factors(hidden, expert))), None],
            1 => [Some(TokenTransform::sylvester(16)), Some(TokenTransform::of_factors(&factors(width, expert)))],
            _ => [None, Some(rotated(expert))],
        });
        let changed = plain.clone().with_transforms(transforms.clone()).unwrap();
        let inputs = inputs(&shape, Generator::Gaussian, dtype);
        let (output, _) = right(&changed, inputs.clone());
        // The comparison notices each transform that is left out.
        let is_quantized = shape.token_format != TokenFormat::Bits16;
        let step = MoeStep::new(&plain, inputs).unwrap();
        for (is_down, stage) in [
            (false, if is_quantized { Stage::QuantizedTokens } else { Stage::Intermediate }),
            (true, if is_quantized { Stage::QuantizedIntermediate } else { Stage::Partial }),
        ] {
            let mut others = transforms.clone();
            others.iter_mut().for_each(|of| *(if is_down { &mut of.down } else { &mut of.gate_up }) = None);
            let found = compare(&plain.clone().with_transforms(others).unwrap(), &step, &output);
            assert_eq!(found.first().expect("a mismatch").stage, stage, "{}", shape.token_format.name());
        }
    }
}

#[test]
fn powers_of_two_as_factors_equal_global_scales() {
    for shape in in_every_format(&layer("layer-test-7")) {
        let dtype = TokenDtype::Bf16;
        let plain = weights(&shape, Generator::Gaussian, dtype);
        let scaled = |matrix: &Matrix<'static>, factor: f32| {
            let (values, scales) = (matrix.values().to_vec(), matrix.scales().to_vec());
            Matrix::new(matrix.rows(), matrix.k(), values, scales, matrix.global_scale() * factor).unwrap()
        };
        let expert = |expert: &MoeExpert<'static>| MoeExpert {
            gate: expert.gate.as_ref().map(|gate| scaled(gate, 2.0)),
            up: scaled(&expert.up, 2.0),
            down: scaled(&expert.down, 0.25),
            biases: expert.biases.clone(),
        };
        let experts = plain.experts().iter().map(expert).collect();
        let sizes = plain.sizes();
        let of_scales = MoeWeights::with_activation(dtype, sizes.top_k, sizes.activation, experts).unwrap();
        let of_scales = of_scales.with_shared(expert(plain.shared().unwrap())).unwrap();
        let of_scales = of_scales.with_token_format(shape.token_format);
        let inputs = inputs(&shape, Generator::Gaussian, dtype);
        let hidden = sizes.hidden;
        let transforms = transforms_of(&plain, |_, width| {
            [(hidden, 2.0), (width, 0.25)].map(|(count, factor)| Some(TokenTransform::of_factors(&vec![factor; count])))
        });
        let of_factors = plain.clone().with_transforms(transforms).unwrap();
        let outputs = [of_factors, of_scales].map(|weights| right(&weights, inputs.clone()).0.hidden);
        assert!(outputs[0] == outputs[1], "{}", shape.token_format.name());
    }
}

/// Computes the layer by its definition, in f64 without intermediate roundings.
fn by_definition(weights: &MoeWeights<'_>, step: &MoeStep<'_>, token: usize) -> Vec<f64> {
    let (dtype, top_k) = (weights.sizes().dtype, weights.sizes().top_k);
    let times = |matrix: &Matrix<'_>, bias: &Option<Bias<'_>>, x: &[f64]| -> Vec<f64> {
        let mut row = vec![0f32; matrix.k()];
        let bias = bias.as_ref().map(|bias| bias.numbers(dtype).into_owned());
        let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum();
        (0..matrix.rows())
            .map(|n| {
                matrix.dequantize_row(n, &mut row);
                let dot: f64 = dot(&row);
                dot + bias.as_ref().map_or(0.0, |bias| f64::from(bias[n]))
            })
            .collect()
    };
    let x: Vec<f64> = step.token(token).iter().map(|&bits| dtype.decode(bits)).collect();
    let mut out = vec![0.0; x.len()];
    let mut add = |expert: &MoeExpert<'_>, on_input: f64, weight: f64| {
        let x: Vec<f64> = x.iter().map(|x| on_input * x).collect();
        let (biases, up) = (&expert.biases, times(&expert.up, &expert.biases.up, &x));
        let gate = expert.gate.as_ref().map_or(vec![0.0; up.len()], |gate| times(gate, &biases.gate, &x));
        let activation = weights.sizes().activation;
        let intermediate: Vec<f64> = gate.iter().zip(up).map(|(&gate, up)| activation.apply(gate, up)).collect();
        out.iter_mut().zip(times(&expert.down, &biases.down, &intermediate)).for_each(|(out, y)| *out += weight * y);
    };
    for choice in token * top_k..(token + 1) * top_k {
        let (id, weight) = (step.inputs().ids[choice], f64::from(step.inputs().weights[choice]));
        let number = weights.expert_map().map_or(id, |map| map[id as usize]);
        let (on_input, weight) = if step.inputs().weights_on_input { (weight, 1.0) } else { (1.0, weight) };
        if let Ok(number) = usize::try_from(number) {
            add(&weights.experts()[number], on_input, weight);
        }
    }
    if let (Some(expert), Some(weights)) = (weights.shared(), &step.inputs().shared_weights) {
        add(expert, 1.0, f64::from(weights[token]));
    }
    out
}

#[test]
fn outputs_match_the_definition_up_to_rounding() {
    let names = ["layer-test-1", "layer-test-5", "layer-test-7", "layer-test-8", "layer-test-10", "layer-test-11"];
    for shape in names.iter().flat_map(|name| in_every_format(&layer(name))) {
        // The largest error among some hundred elements. The tokens of both products are off by about 3 % in e4m3 and
        // 10 % in NVFP4.
        let tolerance = match shape.token_format {
            TokenFormat::Bits16 => 0.005,
            TokenFormat::Fp8 => 0.15,
            TokenFormat::Nvfp4 => 0.5,
        };
        let (name, dtype) = (&shape.name, TokenDtype::F16);
        let weights = weights(&shape, Generator::Gaussian, dtype);
        let step = MoeStep::new(&weights, inputs(&shape, Generator::Gaussian, dtype)).unwrap();
        let output = run(&weights, &step);
        for (token, bits) in output.hidden.chunks(shape.hidden).enumerate() {
            let want = by_definition(&weights, &step, token);
            let scale = want.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            for (&bits, want) in bits.iter().zip(want) {
                assert!((dtype.decode(bits) - want).abs() <= tolerance * scale, "{name}, token {token}: {want}");
            }
        }
    }
}

/// All activations.
const ACTIVATIONS: &[Activation] = &[
    Activation::Silu,
    Activation::SiluLimit { limit: 0.75 },
    Activation::GeluTanh,
    Activation::GPT_OSS,
    Activation::SwigluOai { alpha: 1.5, limit: 2.0, offset: -0.5 },
    Activation::SwigluStep { limit: 0.75 },
    Activation::Gelu,
    Activation::Situ { beta: 1.5, linear: None },
    Activation::Situ { beta: 2.5, linear: Some(1.5) },
    Activation::GatedRelu2,
    Activation::Relu2,
];

#[test]
fn the_cpu_computes_every_activation_with_and_without_biases() {
    for (activation, biases) in ACTIVATIONS.iter().flat_map(|&of| [false, true].map(|biases| (of, biases))) {
        for (dtype, generator) in
            DTYPES.into_iter().flat_map(|dtype| [Generator::Gaussian, Generator::AllCodes].map(|of| (dtype, of)))
        {
            for shape in in_every_format(&layer("layer-test-7").with_activation(activation, biases)) {
                println!("{activation} {biases} {dtype:?} {generator:?} {}", shape.token_format.name());
                let (_, found) = right(&weights(&shape, generator, dtype), inputs(&shape, generator, dtype));
                assert_eq!(found.unbounded(), 0, "every element must have a bound");
            }
        }
    }
}

/// A layer that differs from another only in its activation and biases.
fn described(
    layer: &MoeWeights<'static>,
    activation: Activation,
    biases: impl Fn(&mut Biases<'static>),
) -> MoeWeights<'static> {
    let sizes = layer.sizes();
    let with = |expert: &MoeExpert<'static>| {
        let mut expert = expert.clone();
        biases(&mut expert.biases);
        expert
    };
    MoeWeights::with_activation(sizes.dtype, sizes.top_k, activation, layer.experts().iter().map(with).collect())
        .unwrap()
}

#[test]
fn another_activation_is_found_in_the_stage_it_changes() {
    let dtype = TokenDtype::Bf16;
    let shape = layer("layer-test-1").with_activation(Activation::GPT_OSS, true);
    let weights = weights(&shape, Generator::Gaussian, dtype);
    let inputs = inputs(&shape, Generator::Gaussian, dtype);
    let step = MoeStep::new(&weights, inputs.clone()).unwrap();
    let output = run(&weights, &step);
    let kept = |_: &mut Biases<'static>| ();
    let gpt_oss = |alpha, limit| described(&weights, Activation::GptOss { alpha, limit }, kept);
    let first = |bias: &mut Option<Bias<'static>>| {
        let mut numbers = bias.as_ref().unwrap().numbers(dtype).into_owned();
        numbers[0] += 0.125;
        *bias = Some(Bias::F32(numbers.into()));
    };
    for (other, stage) in [
        (gpt_oss(1.702, 2.0), Stage::Intermediate),
        (gpt_oss(1.75, 7.0), Stage::Intermediate),
        (described(&weights, Activation::SiluLimit { limit: 7.0 }, kept), Stage::Intermediate),
        (described(&weights, Activation::GeluTanh, kept), Stage::Intermediate),
        (described(&weights, Activation::GPT_OSS, |biases| first(&mut biases.gate)), Stage::Intermediate),
        (described(&weights, Activation::GPT_OSS, |biases| first(&mut biases.up)), Stage::Intermediate),
        (described(&weights, Activation::GPT_OSS, |biases| first(&mut biases.down)), Stage::Partial),
        (described(&weights, Activation::GPT_OSS, |biases| biases.down = None), Stage::Partial),
        (
            described(&weights, Activation::GPT_OSS, |biases| std::mem::swap(&mut biases.gate, &mut biases.up)),
            Stage::Intermediate,
        ),
    ] {
        let step = MoeStep::new(&other, inputs.clone()).unwrap();
        let found = compare(&other, &step, &output);
        assert_eq!(found.first().expect("the comparison finds a mismatch").stage, stage);
        let wrong = |of: Stage| found.stages.iter().find(|found| found.stage == of).unwrap().mismatches > 0;
        assert!(
            !wrong(Stage::Output)
                && [Stage::Intermediate, Stage::Partial].map(wrong).into_iter().filter(|&is| is).count() == 1
        );
    }
}

#[test]
fn damage_is_found_in_the_damaged_stage() {
    const OWN: [Stage; 4] = [Stage::QuantizedTokens, Stage::Intermediate, Stage::QuantizedIntermediate, Stage::Partial];
    for (shape, stages) in in_every_format(&layer("layer-test-7")).into_iter().zip([5, 9]) {
        let dtype = TokenDtype::Bf16;
        let weights = weights(&shape, Generator::Gaussian, dtype);
        let step = MoeStep::new(&weights, inputs(&shape, Generator::Gaussian, dtype)).unwrap();
        let good = run(&weights, &step);
        let found = compare(&weights, &step, &good);
        assert_eq!(found.stages.len(), stages);
        for stage in found.stages.iter().map(|found| found.stage) {
            let mut output = good.clone();
            let (row, column) = (7, 13);
            spoil(&mut output, &shape, stage, row, column);
            let found = compare(&weights, &step, &output);
            let first = found.first().expect("the comparison finds a mismatch");
            assert_eq!((first.stage, first.row, first.column), (stage, row, column));
            let of_expert = OWN.contains(&stage);
            let token = if of_expert { step.rows().tokens()[row] as usize } else { row };
            assert_eq!((first.token, first.expert.is_some()), (token, of_expert));
            let stage = found.stages.iter().find(|found| found.stage == stage).unwrap();
            assert_eq!((stage.mismatches, stage.worst), (1, stage.first));
        }
        if let Some(quantized) = &mut good.clone().stages.unwrap().quantized {
            // Every element of the row has another value.
            let mut output = good.clone();
            quantized.shared_tokens.scales[3] = quantized.shared_tokens.scales[3].next_up();
            output.stages.as_mut().unwrap().quantized = Some(quantized.clone());
            let found = compare(&weights, &step, &output);
            let (first, stage) = (found.first().unwrap(), Stage::SharedQuantizedTokens);
            assert_eq!((first.stage, first.row, first.column), (stage, 3, 0));
            assert_eq!(found.stages.iter().find(|found| found.stage == stage).unwrap().mismatches, shape.hidden);
        }
        let mut output = good;
        output.poison();
        let found = compare(&weights, &step, &output);
        // NaN gives NaN in all later stages, so only the first stages are wrong.
        let wrong = found.stages.iter().filter(|stage| stage.mismatches > 0).map(|found| found.stage);
        let begins = if stages == 9 {
            [Stage::QuantizedTokens, Stage::SharedQuantizedTokens]
        } else {
            [Stage::Intermediate, Stage::SharedIntermediate]
        };
        assert_eq!(wrong.collect::<Vec<_>>(), begins);
    }
}

/// Changes the lowest bits of an element. A 16-bit element changes by less than 3 %.
fn spoil(output: &mut MoeOutput, shape: &LayerShape, stage: Stage, row: usize, column: usize) {
    let stages = output.stages.as_mut().unwrap();
    let shared_intermediate = shape.shared_intermediate.unwrap();
    let (bits, width) = match stage {
        Stage::Intermediate => (&mut stages.intermediate, shape.intermediate),
        Stage::Partial => (&mut stages.partial, shape.hidden),
        Stage::SharedIntermediate => (&mut stages.shared_intermediate, shared_intermediate),
        Stage::SharedPartial => (&mut stages.shared_partial, shape.hidden),
        Stage::Output => (&mut output.hidden, shape.hidden),
        quantized => {
            let rows = stages.quantized.as_mut().unwrap();
            let (rows, width) = match quantized {
                Stage::QuantizedTokens => (&mut rows.tokens, shape.hidden),
                Stage::QuantizedIntermediate => (&mut rows.intermediate, shape.intermediate),
                Stage::SharedQuantizedTokens => (&mut rows.shared_tokens, shape.hidden),
                _ => (&mut rows.shared_intermediate, shared_intermediate),
            };
            rows.codes[row * width + column] ^= 1;
            return;
        }
    };
    bits[row * width + column] ^= 3;
}

#[test]
fn a_mismatch_names_stage_token_expert_and_column() {
    let (shape, dtype) = (layer("layer-test-1"), TokenDtype::F16);
    let weights = weights(&shape, Generator::PublicGroup, dtype);
    let step = MoeStep::new(&weights, inputs(&shape, Generator::PublicGroup, dtype)).unwrap();
    let mut output = run(&weights, &step);
    output.stages.as_mut().unwrap().intermediate[3] = 0x7C00;
    let first = compare(&weights, &step, &output).first().unwrap();
    let text =
        format!("intermediate, token {}, expert {}, column 3: got inf, want ", first.token, first.expert.unwrap());
    assert!(first.to_string().starts_with(&text), "{first}");
}

#[test]
fn a_row_missing_from_the_sum_is_found() {
    let (shape, dtype) = (layer("layer-test-4"), TokenDtype::F16);
    let weights = weights(&shape, Generator::Gaussian, dtype);
    let inputs = inputs(&shape, Generator::Gaussian, dtype);
    let step = MoeStep::new(&weights, inputs.clone()).unwrap();
    let mut less = inputs;
    less.weights.to_mut()[2] = 0.0;
    let mut output = run(&weights, &step);
    output.hidden = run(&weights, &MoeStep::new(&weights, less).unwrap()).hidden;
    let found = compare(&weights, &step, &output);
    assert_eq!(found.first().unwrap().stage, Stage::Output);
}

#[test]
fn infinities_and_nan_of_a_token_stay_in_that_token() {
    let shapes = ["layer-test-1", "layer-test-7"].map(layer);
    let shapes = shapes.each_ref().map(in_every_format).into_iter().flatten();
    let of_activations = ACTIVATIONS.iter().map(|&activation| {
        let mut shape = layer("layer-test-4").with_activation(activation, true);
        shape.tokens = 4;
        shape
    });
    for (shape, dtype) in shapes.chain(of_activations).flat_map(|shape| DTYPES.map(|dtype| (shape.clone(), dtype))) {
        let weights = weights(&shape, Generator::Gaussian, dtype);
        let clean = inputs(&shape, Generator::Gaussian, dtype);
        let (before, _) = right(&weights, clean.clone());
        for special in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            let mut spoilt = clean.clone();
            spoilt.hidden.to_mut()[2 * shape.hidden + 5] = dtype.round(special);
            let (after, _) = right(&weights, spoilt);
            for (token, (before, after)) in
                before.hidden.chunks(shape.hidden).zip(after.hidden.chunks(shape.hidden)).enumerate()
            {
                assert_eq!(before == after, token != 2, "{} {}: token {token}", shape.name, shape.activation);
            }
        }
    }
}

#[test]
fn f16_overflow_stays_in_its_token() {
    let (shape, dtype) = (layer("layer-test-1"), TokenDtype::F16);
    let weights = weights(&shape, Generator::Gaussian, dtype);
    let mut inputs = inputs(&shape, Generator::Gaussian, dtype);
    for bits in &mut inputs.hidden.to_mut()[shape.hidden..2 * shape.hidden] {
        *bits = dtype.round(dtype.decode(*bits) * 1e4);
    }
    let (output, _) = right(&weights, inputs);
    let is_finite = |bits: &[u16]| bits.iter().all(|&bits| dtype.decode(bits).is_finite());
    let finite: Vec<_> = output.hidden.chunks(shape.hidden).map(is_finite).collect();
    assert_eq!(finite, [true, false, true, true, true]);
}

#[test]
fn bf16_overflow_of_f32_is_counted_but_not_judged() {
    let (shape, dtype) = (layer("layer-test-4"), TokenDtype::Bf16);
    let weights = weights(&shape, Generator::AllCodes, dtype);
    let mut inputs = inputs(&shape, Generator::AllCodes, dtype);
    inputs.hidden.to_mut().fill(dtype.round(1e38));
    let (_, found) = right(&weights, inputs);
    assert_eq!(found.stages[0].unbounded, found.stages[0].checked);
}

#[test]
fn any_routing_is_computed() {
    let (mut shape, dtype) = (layer("layer-test-2"), TokenDtype::Bf16);
    shape.tokens = 9;
    let weights = weights(&shape, Generator::Gaussian, dtype);
    let inputs = inputs(&shape, Generator::Gaussian, dtype);
    let with_ids = |id: &dyn Fn(usize) -> i32| {
        let ids: Vec<i32> = (0..inputs.ids.len()).map(id).collect();
        let rows = ids.iter().filter(|&id| (0..8).contains(id)).count();
        let (output, _) = right(&weights, MoeInputs { ids: ids.into(), ..inputs.clone() });
        assert_eq!(output.stages.unwrap().partial.len(), rows * shape.hidden);
        output.hidden
    };
    with_ids(&|_| 3); // all choices name the same expert
    with_ids(&|choice| choice as i32 % 2 * 5); // a token names one expert twice
    with_ids(&|choice| choice as i32 - 4); // some ids name no expert
    assert!(with_ids(&|_| -1).iter().all(|&bits| bits == 0), "tokens without experts give zeros");
    assert!(with_ids(&|_| 8).iter().all(|&bits| bits == 0));
}

#[test]
fn a_tokens_bits_do_not_depend_on_the_batch() {
    for (shape, dtype) in in_every_format(&layer("layer-test-7")).map(|shape| (shape, TokenDtype::F16)) {
        let weights = weights(&shape, Generator::Gaussian, dtype);
        let all = inputs(&shape, Generator::Gaussian, dtype);
        let (together, _) = right(&weights, all.clone());
        for token in 0..shape.tokens {
            let choices = token * shape.top_k..(token + 1) * shape.top_k;
            let alone = MoeInputs {
                tokens: 1,
                hidden: all.hidden[token * shape.hidden..][..shape.hidden].into(),
                ids: all.ids[choices.clone()].into(),
                weights: all.weights[choices].into(),
                shared_weights: all.shared_weights.as_ref().map(|weights| weights[token..=token].into()),
                ..all
            };
            let (alone, _) = right(&weights, alone);
            assert_eq!(alone.hidden, together.hidden[token * shape.hidden..][..shape.hidden]);
        }
    }
}

#[test]
fn samples_find_frequent_errors_and_accept_right_outputs() {
    let (shape, dtype) = (layer("layer-test-7"), TokenDtype::Bf16);
    let weights = weights(&shape, Generator::AllCodes, dtype);
    let step = MoeStep::new(&weights, inputs(&shape, Generator::AllCodes, dtype)).unwrap();
    let mut output = run(&weights, &step);
    let found = compare_sample(&weights, &step, &output, 500, 1);
    assert!(found.passed() && found.checked() == 5 * 500);
    output.stages.as_mut().unwrap().shared_intermediate.iter_mut().for_each(|bits| *bits ^= 0x8000);
    let found = compare_sample(&weights, &step, &output, 500, 1);
    assert_eq!(found.first().unwrap().stage, Stage::SharedIntermediate);
    for format in [TokenFormat::Fp8, TokenFormat::Nvfp4] {
        let weights = weights.clone().with_token_format(format);
        let step = MoeStep::new(&weights, inputs(&shape, Generator::AllCodes, dtype)).unwrap();
        let right = run(&weights, &step);
        let found = compare_sample(&weights, &step, &right, 500, 1);
        assert!(found.passed() && found.checked() == 9 * 500);
        let wrong = |change: &dyn Fn(&mut QuantizedRows)| {
            let mut output = right.clone();
            change(&mut output.stages.as_mut().unwrap().quantized.as_mut().unwrap().intermediate);
            compare_sample(&weights, &step, &output, 500, 1).first().unwrap().stage
        };
        let sign = if format == TokenFormat::Fp8 { 0x80 } else { 8 };
        let changes: [&dyn Fn(&mut QuantizedRows); 3] = [
            &|of| of.codes.iter_mut().for_each(|code| *code ^= sign),
            &|of| of.scales.iter_mut().for_each(|scale| *scale *= 2.0),
            &|of| of.block_scales.iter_mut().for_each(|scale| *scale ^= 1),
        ];
        // FP8 has no block scales.
        for change in &changes[..if format == TokenFormat::Fp8 { 2 } else { 3 }] {
            assert_eq!(wrong(change), Stage::QuantizedIntermediate);
        }
    }
}

#[test]
fn input_scales_replace_the_global_scales_of_tokens() {
    let (shape, dtype) = (layer("layer-test-7"), TokenDtype::Bf16);
    let own = weights(&shape, Generator::Gaussian, dtype).with_token_format(TokenFormat::Nvfp4);
    let scales = |count: usize| vec![InputScales { gate_up: 2e-3, down: 1e-3 }; count];
    let experts = shape.experts + usize::from(shape.shared_intermediate.is_some());
    let error = own.clone().with_input_scales(scales(experts - 1)).unwrap_err().to_string();
    assert!(error.starts_with("input scales (one per expert, including the shared expert): got"), "{error}");
    let mut wrong = scales(experts);
    wrong[1].down = f32::NAN;
    let error = own.clone().with_input_scales(wrong).unwrap_err().to_string();
    assert!(error.starts_with("expert 1: down: input scale NaN must be from"), "{error}");
    let given = own.clone().with_input_scales(scales(experts)).unwrap();
    let of = |weights: &MoeWeights<'_>| {
        let (output, _) = right(weights, inputs(&shape, Generator::Gaussian, dtype));
        output.stages.unwrap().quantized.unwrap()
    };
    let (own, given) = (of(&own), of(&given));
    assert!(given.tokens.scales.iter().all(|&scale| scale == 2e-3) && given.intermediate.scales[0] == 1e-3);
    assert!(own.tokens.scales.windows(2).any(|two| two[0] != two[1]));
}

#[test]
fn steps_and_outputs_of_other_layers_are_refused() {
    let dtype = TokenDtype::F16;
    let (one, other) = (layer("layer-test-1"), layer("layer-test-2"));
    let (weights, other_weights) =
        (weights(&one, Generator::Gaussian, dtype), weights(&other, Generator::Gaussian, dtype));
    let step = MoeStep::new(&weights, inputs(&one, Generator::Gaussian, dtype)).unwrap();
    let mut prepared = Cpu::new().prepare_moe(&other_weights).unwrap();
    let error = prepared.execute(&step, &mut MoeOutput::new(&step)).unwrap_err().to_string();
    assert!(error.starts_with("this step was made for another layer"), "{error}");
    let mut prepared = Cpu::new().prepare_moe(&weights).unwrap();
    let mut short = MoeOutput::with_stages(&step);
    short.stages.as_mut().unwrap().partial.pop();
    let error = prepared.execute(&step, &mut short).unwrap_err().to_string();
    assert!(error.starts_with("this output was made for another step"), "{error}");
}
