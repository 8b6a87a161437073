//! Checks routers on every backend: experts and weights are right, and all backends give the same bits.

use half::{bf16, f16};
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::backend::{Backend, cpu::Cpu, cuda::Cuda};
use nvfp4::router::compare::compare;
use nvfp4::router::{Logits, Router, Routes, Scoring};
use nvfp4_tests::skip;

/// Returns an emulated GPU for portable kernels on each of three schedules.
fn emulated() -> Vec<Box<dyn Backend>> {
    let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(3)];
    let gpu = |schedule| Emulated::new("sm_80", Options { schedule, sms: Some(2), ..Options::default() });
    schedules.map(|schedule| Box::new(gpu(schedule).expect("an architecture with kernels")) as _).into()
}

fn backends() -> Vec<Box<dyn Backend>> {
    let mut backends = emulated();
    match Cuda::open(0) {
        Ok(gpu) => backends.push(Box::new(gpu)),
        Err(error) if error.is_no_device() => skip("backend cuda", error),
        Err(error) => panic!("backend cuda: {error}"),
    }
    backends
}

fn groups(experts: usize, groups: usize, top_groups: usize, renormalize: bool) -> Scoring {
    let bias = (0..experts).map(|expert| [0.0, 0.125, -0.25, 0.125, 0.5][expert * 7 % 5]).collect();
    Scoring::SigmoidGroups { bias, groups, top_groups, renormalize, scale: 2.5 }
}

fn routers() -> Vec<Router> {
    [
        (128, 8, Scoring::Softmax { renormalize: true }),
        (60, 4, Scoring::Softmax { renormalize: false }),
        (512, 32, Scoring::Softmax { renormalize: false }),
        (128, 4, Scoring::TopKSoftmax),
        (3, 3, Scoring::TopKSoftmax),
        (16, 1, Scoring::SigmoidTop1),
        (256, 8, groups(256, 8, 4, true)),
        (36, 6, groups(36, 6, 2, false)),
        (64, 32, groups(64, 32, 32, true)),
        (384, 8, groups(384, 1, 1, true)),
    ]
    .into_iter()
    .map(|(experts, top_k, scoring)| Router::new(experts, top_k, scoring).expect("valid sizes"))
    .collect()
}

/// Makes numbers with ties, large distances, infinities and NaN.
fn numbers(count: usize) -> Vec<f32> {
    let number = |i: usize| match i.wrapping_mul(0x9E37_79B9) >> 7 & 0xFF {
        0 if i > 2000 => f32::NAN,
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        3 => -0.0,
        4 => 0.0,
        5 => -300.0,
        x if x < 64 => (x % 8) as f32 - 4.0,
        x => (x as f32 - 128.0) / 13.0 + (i % 7) as f32 / 100.0,
    };
    (0..count).map(number).collect()
}

/// Returns the ids and the bits of the weights. Every NaN has the same bits, so that equal routes compare equal.
fn bits(routes: &Routes) -> (Vec<i32>, Vec<u32>) {
    (
        routes.ids.clone(),
        routes.weights.iter().map(|weight| if weight.is_nan() { !0 } else { weight.to_bits() }).collect(),
    )
}

#[test]
fn every_router_is_right_with_the_same_bits_everywhere() {
    let backends = backends();
    for router in routers() {
        let numbers = numbers(9 * router.experts());
        let logits: [Logits<'_>; 3] = [
            Logits::F16(numbers.iter().map(|&x| f16::from_f32(x).to_bits()).collect()),
            Logits::Bf16(numbers.iter().map(|&x| bf16::from_f32(x).to_bits()).collect()),
            Logits::F32(numbers.into()),
        ];
        for logits in logits {
            let expected = Cpu::new().route(&router, &logits).unwrap();
            assert_eq!(compare(&router, &logits, &expected).unwrap(), None, "cpu: {router:?}");
            for backend in &backends {
                let routes = backend.route(&router, &logits).unwrap_or_else(|error| panic!("{router:?}: {error}"));
                let wrong = compare(&router, &logits, &routes).unwrap();
                assert!(wrong.is_none(), "{}: {router:?}: {}", backend.device(), wrong.unwrap());
                assert_eq!(bits(&routes), bits(&expected), "{}: {router:?}", backend.device());
            }
        }
    }
}

#[test]
fn routes_of_a_token_do_not_depend_on_the_batch() {
    let router = Router::new(60, 4, Scoring::Softmax { renormalize: false }).expect("valid sizes");
    let numbers = numbers(7 * 60);
    for backend in backends() {
        let all = backend.route(&router, &Logits::F32((&numbers[..]).into())).unwrap();
        for (token, logits) in numbers.chunks(60).enumerate() {
            let one = backend.route(&router, &Logits::F32(logits.into())).unwrap();
            let of_all =
                Routes { ids: all.ids[4 * token..][..4].into(), weights: all.weights[4 * token..][..4].into() };
            assert_eq!(bits(&one), bits(&of_all), "{}: token {token}", backend.device());
        }
        assert_eq!(backend.route(&router, &Logits::F32(vec![].into())).unwrap(), Routes::default());
    }
}
