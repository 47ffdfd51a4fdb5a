//! The chain on hand-made logits, and against a slow twin written plainly from the definitions.

use powerinfer_sparse_ops::TokenId;
use proptest::prelude::*;

use super::*;

fn free() -> SamplingParams {
    SamplingParams::unfiltered().seed(1)
}

fn sampler(params: SamplingParams, n_vocab: usize) -> Sampler {
    Sampler::new(params, n_vocab).unwrap()
}

fn greedy_of(params: SamplingParams, accepted: &[u32], logits: &[f32]) -> u32 {
    let mut sampler = sampler(params.temperature(0.0), logits.len());
    for &id in accepted {
        sampler.accept(TokenId(id)).unwrap();
    }
    sampler.sample(logits).unwrap().0
}

/// Logits whose softmax is `probabilities`.
fn logits_of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

/// Share of each token in `n` draws.
fn frequencies(sampler: &mut Sampler, logits: &[f32], n: usize) -> Vec<f64> {
    let mut counts = vec![0.0; logits.len()];
    for _ in 0..n {
        counts[sampler.sample(logits).unwrap().index()] += 1.0 / n as f64;
    }
    counts
}

/// The tokens that come up in 2000 draws.
fn support(params: SamplingParams, logits: &[f32]) -> Vec<u32> {
    let shares = frequencies(&mut sampler(params, logits.len()), logits, 2000);
    (0..).zip(shares).filter(|(_, share)| *share > 0.0).map(|(id, _)| id).collect()
}

/// Pearson's statistic of `n` draws against expected probabilities.
fn chi_square(shares: &[f64], expected: &[f64], n: usize) -> f64 {
    let term = |(got, want): (&f64, &f64)| if *want > 0.0 { (got - want).powi(2) / want } else { 0.0 };
    n as f64 * shares.iter().zip(expected).map(term).sum::<f64>()
}

/// The four cuts from their definitions, on a fully sorted list; probability of each token at the draw.
fn twin(params: &SamplingParams, logits: &[f32]) -> Vec<f64> {
    let softmax = |kept: &[usize], t: f64| -> Vec<f64> {
        let max = kept.iter().map(|&i| f64::from(logits[i])).fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = kept.iter().map(|&i| ((f64::from(logits[i]) - max) / t).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|e| e / sum).collect()
    };
    let take_mass = |kept: &[usize], p: &[f64], order: &[usize], mass: f64| -> Vec<usize> {
        let (mut out, mut sum) = (Vec::new(), 0.0);
        for &at in order {
            out.push(kept[at]);
            sum += p[at];
            if sum >= mass {
                break;
            }
        }
        out.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        out
    };
    let mut kept: Vec<usize> = (0..logits.len()).filter(|&i| logits[i].is_finite()).collect();
    kept.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    if params.top_k > 0 {
        kept.truncate(params.top_k);
    }
    if params.typical < 1.0 {
        let p = softmax(&kept, 1.0);
        let entropy: f64 = p.iter().map(|p| if *p > 0.0 { -p * p.ln() } else { 0.0 }).sum();
        let mut order: Vec<usize> = (0..kept.len()).collect();
        order.sort_by(|&a, &b| (-p[a].ln() - entropy).abs().total_cmp(&(-p[b].ln() - entropy).abs()));
        kept = take_mass(&kept, &p, &order, params.typical.into());
    }
    if params.top_p < 1.0 {
        let p = softmax(&kept, 1.0);
        let order: Vec<usize> = (0..kept.len()).collect();
        kept = take_mass(&kept, &p, &order, params.top_p.into());
    }
    let p = softmax(&kept, 1.0);
    let enough = |at: &usize| p[*at] >= f64::from(params.min_p) * p[0] * (1.0 - 1e-12);
    kept = (0..kept.len()).filter(enough).map(|at| kept[at]).collect();
    let mut out = vec![0.0; logits.len()];
    for (&i, p) in kept.iter().zip(softmax(&kept, params.temperature.into())) {
        out[i] = p;
    }
    out
}

#[test]
fn temperature_zero_takes_the_largest_and_ties_go_to_the_lowest_id() {
    assert_eq!(greedy_of(SamplingParams::greedy(), &[], &[1.0, 3.0, 2.0]), 1);
    assert_eq!(greedy_of(SamplingParams::greedy(), &[], &[0.5, 2.0, 2.0, 2.0]), 1);
    assert_eq!(greedy_of(SamplingParams::greedy(), &[], &[-1.0, -0.0, 0.0]), 1, "zeros of both signs tie");
    assert_eq!(greedy_of(SamplingParams::greedy(), &[], &[f32::NEG_INFINITY, -f32::MAX]), 1);
    // With an adjusted logit the choice is made among candidates: same rule.
    let adjusted = SamplingParams::greedy().logit_bias(TokenId(0), 1.5);
    assert_eq!(greedy_of(adjusted.clone(), &[], &[0.5, 1.0, 2.0, 2.0]), 0);
    assert_eq!(greedy_of(adjusted, &[], &[0.0, 1.0, 2.0, 2.0]), 2);
    let with_mirostat = SamplingParams::greedy().mirostat(Mirostat::V1, 5.0, 0.1);
    assert_eq!(greedy_of(with_mirostat, &[], &[1.0, 3.0, 2.0]), 1);
}

#[test]
fn top_k_zero_is_off_and_ties_at_the_border_go_to_the_lowest_id() {
    let logits = [0.0; 60];
    assert_eq!(support(free().top_k(0), &logits).len(), 60);
    assert_eq!(support(free().top_k(1000), &logits).len(), 60);
    assert_eq!(support(free().top_k(3), &[0.0, 1.0, 0.0, 0.0, 0.0]), [0, 1, 2]);
}

#[test]
fn top_p_zero_keeps_one_and_one_is_off() {
    let logits = logits_of(&[0.2, 0.5, 0.3]);
    assert_eq!(support(free().top_p(0.0), &logits), [1]);
    assert_eq!(support(free().top_p(0.4), &logits), [1]);
    assert_eq!(support(free().top_p(0.6), &logits), [1, 2]);
    assert_eq!(support(free().top_p(0.9), &logits), [0, 1, 2]);
    assert_eq!(support(free().top_p(1.0), &logits), [0, 1, 2]);
    assert_eq!(support(free().top_p(0.0), &[1.0; 500]), [0]);
}

#[test]
fn top_p_normalizes_what_top_k_left() {
    // Alone 0.5 needs three tokens; of the two that top-k leaves, the first has 0.6 of the mass.
    let logits = logits_of(&[0.24, 0.16, 0.15, 0.15, 0.15, 0.15]);
    assert_eq!(support(free().top_p(0.5), &logits), [0, 1, 2]);
    assert_eq!(support(free().top_k(2).top_p(0.5), &logits), [0]);
}

#[test]
fn min_p_is_a_share_of_the_most_probable() {
    let logits = logits_of(&[0.1, 0.6, 0.3]);
    assert_eq!(support(free().min_p(0.0), &logits), [0, 1, 2]);
    assert_eq!(support(free().min_p(0.3), &logits), [1, 2]);
    assert_eq!(support(free().min_p(1.0), &logits), [1]);
    assert_eq!(support(free().min_p(1.0), &[2.0, 1.0, 2.0]), [0, 2]);
}

#[test]
fn typical_may_drop_the_most_probable() {
    // Entropy 1.36 nats; surprises 0.69 and 1.90 nats: the rare ones are nearer, ties by id.
    let logits = logits_of(&[0.5, 0.15, 0.15, 0.1, 0.1]);
    assert_eq!(support(free().typical(0.25), &logits), [1, 2]);
    assert_eq!(support(free().typical(0.0), &logits), [1]);
    assert_eq!(support(free().typical(1.0), &logits), [0, 1, 2, 3, 4]);
}

#[test]
fn repetition_counts_once_per_distinct_id() {
    let params = SamplingParams::greedy().repeat_penalty(1.5);
    // 3 / 1.5 = 2 beats 1.9; applied twice it would lose.
    assert_eq!(greedy_of(params.clone(), &[0; 20], &[3.0, 1.9]), 0);
    assert_eq!(greedy_of(params.clone(), &[0; 20], &[3.0, 2.1]), 1);
    // Below zero it multiplies: -1 becomes -1.5.
    assert_eq!(greedy_of(params.clone(), &[0; 20], &[-1.0, -1.4]), 1);
    assert_eq!(greedy_of(params.clone(), &[0; 20], &[-1.0, -1.6]), 0);
    assert_eq!(greedy_of(params, &[], &[3.0, 2.1]), 0);
}

#[test]
fn frequency_goes_by_count_and_presence_once() {
    let frequency = SamplingParams::greedy().frequency_penalty(0.5);
    assert_eq!(greedy_of(frequency.clone(), &[0, 1, 0, 0], &[5.0, 3.9]), 0, "5 - 1.5 against 3.9 - 0.5");
    assert_eq!(greedy_of(frequency.clone(), &[0, 0, 0], &[5.0, 3.6]), 1);
    assert_eq!(greedy_of(frequency, &[0, 0], &[5.0, 3.6]), 0);
    let presence = SamplingParams::greedy().presence_penalty(0.5);
    assert_eq!(greedy_of(presence.clone(), &[0; 9], &[5.0, 4.4]), 0);
    assert_eq!(greedy_of(presence, &[0; 9], &[5.0, 4.6]), 1);
}

#[test]
fn negative_penalties_reward() {
    assert_eq!(greedy_of(SamplingParams::greedy().presence_penalty(-1.0), &[1], &[0.5, 0.0]), 1);
}

#[test]
fn the_window_holds_the_last_n_tokens() {
    let params = SamplingParams::greedy().presence_penalty(10.0);
    let logits = [3.0, 2.0, 1.0];
    assert_eq!(greedy_of(params.clone().repeat_last_n(2), &[0, 1, 1], &logits), 0, "token 0 has left");
    assert_eq!(greedy_of(params.clone().repeat_last_n(3), &[0, 1, 1], &logits), 2);
    assert_eq!(greedy_of(params.repeat_last_n(0), &[0, 1, 1], &logits), 0, "0 is off");
}

#[test]
fn bias_comes_before_all_cuts_and_bans() {
    let logits = [5.0, 0.0, 1.0];
    assert_eq!(support(free().top_k(1).logit_bias(TokenId(1), 10.0), &logits), [1]);
    assert_eq!(support(free().logit_bias(TokenId(0), f32::NEG_INFINITY), &logits), [1, 2]);
    let twice = SamplingParams::greedy().logit_bias(TokenId(1), 3.0).logit_bias(TokenId(1), 3.0);
    assert_eq!(greedy_of(twice, &[], &logits), 1, "biases of one token add up");
    // Before the penalty too: (1 + 3) / 2 = 2 loses to 2.5, 1 / 2 + 3 would win.
    let both = SamplingParams::greedy().logit_bias(TokenId(0), 3.0).repeat_penalty(2.0);
    assert_eq!(greedy_of(both, &[0], &[1.0, 2.5]), 1);
}

#[test]
fn extreme_finite_settings_stay_finite() {
    let params = free()
        .logit_bias(TokenId(0), f32::MAX)
        .repeat_penalty(f32::MIN_POSITIVE)
        .frequency_penalty(-f32::MAX)
        .presence_penalty(f32::MAX)
        .temperature(f32::MIN_POSITIVE);
    for params in [
        params.clone(),
        params.clone().mirostat(Mirostat::V1, f32::MAX, f32::MAX),
        params.mirostat(Mirostat::V2, f32::MAX, f32::MAX),
    ] {
        let mut sampler = sampler(params, 3);
        for _ in 0..5 {
            sampler.accept(TokenId(0)).unwrap();
            assert_eq!(sampler.sample(&[f32::MAX, -f32::MAX, 0.0]), Ok(TokenId(0)));
        }
    }
}

#[test]
fn broken_logits_are_errors_that_name_the_token() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for params in [SamplingParams::greedy(), free()] {
        let mut sampler = sampler(params, 3);
        let error = sampler.sample(&[0.0, 1.0, nan]).unwrap_err();
        assert!(matches!(error, SamplingError::BadLogit { token: TokenId(2), got } if got.is_nan()));
        let bad = SamplingError::BadLogit { token: TokenId(1), got: inf };
        assert_eq!(sampler.sample(&[0.0, inf, 1.0]), Err(bad.clone()));
        assert_eq!(sampler.top_logprobs(&[0.0, inf, 1.0], 1, &mut Vec::new()), Err(bad.clone()));
        assert_eq!(sampler.logprob(&[0.0, inf, 1.0], TokenId(0)), Err(bad));
        assert_eq!(sampler.sample(&[-inf; 3]), Err(SamplingError::NoCandidate { n_vocab: 3 }));
        assert_eq!(sampler.sample(&[0.0; 2]), Err(SamplingError::LogitsLength { expected: 3, got: 2 }));
    }
    let mut banned = sampler(free().logit_bias(TokenId(0), -inf), 2);
    assert_eq!(banned.sample(&[1.0, -inf]), Err(SamplingError::NoCandidate { n_vocab: 2 }));
}

#[test]
fn an_error_uses_no_random_number() {
    let logits = [0.0; 50];
    let (mut a, mut b) = (sampler(free(), 50), sampler(free(), 50));
    assert!(a.sample(&[f32::NAN; 50]).is_err());
    for _ in 0..20 {
        assert_eq!(a.sample(&logits), b.sample(&logits));
    }
}

#[test]
fn tokens_out_of_range_are_errors() {
    let mut sampler = sampler(free(), 3);
    let error = SamplingError::TokenOutOfRange { token: TokenId(3), n_vocab: 3 };
    assert_eq!(sampler.accept(TokenId(3)), Err(error.clone()));
    assert_eq!(sampler.logprob(&[0.0; 3], TokenId(3)), Err(error));
}

#[test]
fn settings_out_of_range_are_errors_by_name() {
    let nan = f32::NAN;
    let p = SamplingParams::default;
    let cases: Vec<(&str, SamplingParams)> = vec![
        ("temperature", p().temperature(-0.1)),
        ("temperature", p().temperature(nan)),
        ("temperature", p().temperature(f32::INFINITY)),
        ("top_p", p().top_p(1.1)),
        ("top_p", p().top_p(-0.1)),
        ("top_p", p().top_p(nan)),
        ("min_p", p().min_p(1.5)),
        ("min_p", p().min_p(nan)),
        ("typical", p().typical(-1.0)),
        ("typical", p().typical(nan)),
        ("repeat_penalty", p().repeat_penalty(0.0)),
        ("repeat_penalty", p().repeat_penalty(nan)),
        ("frequency_penalty", p().frequency_penalty(f32::INFINITY)),
        ("presence_penalty", p().presence_penalty(nan)),
        ("mirostat_tau", p().mirostat(Mirostat::V2, -1.0, 0.1)),
        ("mirostat_eta", p().mirostat(Mirostat::V2, 5.0, nan)),
    ];
    for (expected, params) in cases {
        let error = params.validate(10).unwrap_err();
        assert!(matches!(error, SamplingError::SettingRange { name, .. } if name == expected), "{error}");
        assert!(Sampler::new(params, 10).is_err());
    }
    assert_eq!(p().validate(10), Ok(()));
    assert_eq!(p().validate(0), Err(SamplingError::VocabularySize { n_vocab: 0 }));
    assert_eq!(
        p().repeat_last_n(MAX_REPEAT_LAST_N + 1).validate(10),
        Err(SamplingError::WindowTooLong { got: MAX_REPEAT_LAST_N + 1, limit: MAX_REPEAT_LAST_N })
    );
    assert_eq!(
        p().logit_bias(TokenId(10), 1.0).validate(10),
        Err(SamplingError::BiasToken { token: TokenId(10), n_vocab: 10 })
    );
    assert_eq!(
        p().logit_bias(TokenId(9), f32::INFINITY).validate(10),
        Err(SamplingError::BiasValue { token: TokenId(9), got: f32::INFINITY })
    );
}

#[test]
fn defaults_are_the_documented_ones() {
    let p = SamplingParams::default();
    assert_eq!((p.temperature, p.top_k, p.top_p, p.min_p, p.typical), (0.8, 40, 0.95, 0.05, 1.0));
    assert_eq!((p.repeat_last_n, p.repeat_penalty), (64, 1.0));
    assert_eq!((p.frequency_penalty, p.presence_penalty), (0.0, 0.0));
    assert_eq!((p.mirostat, p.mirostat_tau, p.mirostat_eta, p.seed), (Mirostat::Off, 5.0, 0.1, None));
    assert!(p.logit_bias.is_empty() && !p.penalizes());
}

#[test]
fn settings_travel_as_json() {
    let params = SamplingParams::default()
        .mirostat(Mirostat::V2, 3.0, 0.2)
        .logit_bias(TokenId(7), -1.5)
        .logit_bias(TokenId(8), f32::NEG_INFINITY)
        .seed(u64::MAX);
    let json = serde_json::to_value(&params).unwrap();
    assert_eq!(json["logit_bias"], serde_json::json!([[7, -1.5], [8, null]]));
    assert_eq!(json["mirostat"], "v2");
    assert_eq!(serde_json::from_value::<SamplingParams>(json).unwrap(), params);
    let partial: SamplingParams = serde_json::from_str(r#"{"top_k": 5}"#).unwrap();
    assert_eq!(partial, SamplingParams::default().top_k(5));
    assert!(serde_json::from_str::<SamplingParams>(r#"{"topk": 5}"#).is_err());
}

#[test]
fn the_random_stream_is_the_published_one() {
    // Written from the public definitions of SplitMix64 and xoshiro256++.
    let mut z = 42u64;
    let mut split_mix = || {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = z;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let mut s = [split_mix(), split_mix(), split_mix(), split_mix()];
    let mut next = || {
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    };
    // With 1024 equal tokens, in id order, the token is the top ten bits.
    let mut sampler = sampler(free().seed(42), 1024);
    for _ in 0..100 {
        assert_eq!(u64::from(sampler.sample(&[0.0; 1024]).unwrap().0), next() >> 54);
    }
}

#[test]
fn same_seed_same_tokens_and_clone_reset_reseed_do_as_they_say() {
    let logits: Vec<f32> = (0..200u32).map(|i| (i * 37 % 101) as f32 * 0.05).collect();
    let params = SamplingParams::default().repeat_penalty(1.3).mirostat(Mirostat::V2, 4.0, 0.3);
    let take = |sampler: &mut Sampler| -> Vec<u32> {
        (0..50)
            .map(|_| {
                let token = sampler.sample(&logits).unwrap();
                sampler.accept(token).unwrap();
                token.0
            })
            .collect()
    };
    let mut a = sampler(params.clone().seed(9), 200);
    let first = take(&mut a);
    let mut fork = a.clone();
    let second = take(&mut a);
    assert_ne!(first, second);
    assert_eq!(take(&mut fork), second, "a fork continues as the original");
    a.reset();
    assert_eq!(take(&mut a), first);
    assert_ne!(take(&mut sampler(params.clone().seed(10), 200)), first);
    let mut c = sampler(params.clone().seed(10), 200);
    c.reseed(9);
    assert_eq!((take(&mut c), c.seed()), (first, 9));
    // Without a seed one is drawn, and can be used again.
    let mut unseeded = sampler(params.clone(), 200);
    let drawn = take(&mut unseeded);
    assert_eq!(take(&mut sampler(params.seed(unseeded.seed()), 200)), drawn);
}

#[test]
fn draws_follow_the_distribution() {
    let p = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04];
    let n = 50_000;
    // Five degrees of freedom: 20.5 is passed by chance once in a thousand; the seed is fixed.
    let shares = frequencies(&mut sampler(free(), 6), &logits_of(&p), n);
    assert!(chi_square(&shares, &p, n) < 20.5, "{shares:?}");
    // Temperature 2 takes square roots.
    let roots: Vec<f64> = p.iter().map(|p| p.sqrt()).collect();
    let sum: f64 = roots.iter().sum();
    let flat: Vec<f64> = roots.iter().map(|r| r / sum).collect();
    let shares = frequencies(&mut sampler(free().temperature(2.0), 6), &logits_of(&p), n);
    assert!(chi_square(&shares, &flat, n) < 20.5, "{shares:?}");
    assert!(chi_square(&shares, &p, n) > 1000.0, "the test can tell the two apart");
}

#[test]
fn temperature_comes_after_the_cuts() {
    // At temperature 0.1 applied first, 0.5 of the mass would be one token.
    let logits = logits_of(&[0.3, 0.28, 0.22, 0.2]);
    assert_eq!(support(free().top_p(0.5).temperature(0.1), &logits), [0, 1]);
}

#[test]
fn mirostat_v2_cuts_at_the_limit_and_learns() {
    // Surprises 1, 2, 3 and 3 bits; the limit starts at 2·tau.
    let logits = logits_of(&[0.5, 0.25, 0.125, 0.125]);
    assert_eq!(support(free().mirostat(Mirostat::V2, 1.25, 0.0), &logits), [0, 1]);
    assert_eq!(support(free().mirostat(Mirostat::V2, 0.1, 0.0), &logits), [0], "one is always kept");
    assert_eq!(support(free().mirostat(Mirostat::V2, 5.0, 0.0), &logits), [0, 1, 2, 3]);
    // Followed step by step: the limit moves by eta times the error.
    let (tau, eta, mut limit) = (1.5, 0.75, 3.0);
    let mut sampler = sampler(free().mirostat(Mirostat::V2, tau as f32, eta as f32), 4);
    let (mut seen, mut forced) = ([false; 4], 0);
    for _ in 0..500 {
        let token = sampler.sample(&logits).unwrap();
        let bits = [1.0, 2.0, 3.0, 3.0][token.index()];
        assert!(bits <= limit + 1e-4 || token == TokenId(0), "{bits} bits past {limit}");
        seen[token.index()] = true;
        forced += i32::from(limit < 1.9);
        limit -= eta * (bits - tau);
    }
    assert!(forced > 20, "the limit often allows one token only: {forced}");
    assert_eq!(seen, [true; 4]);
}

#[test]
fn mirostat_ignores_the_other_cuts() {
    let params = free().top_k(1).top_p(0.0).min_p(1.0).typical(0.0);
    for version in [Mirostat::V1, Mirostat::V2] {
        assert_eq!(support(params.clone().mirostat(version, 50.0, 0.0), &[0.3, 0.2, 0.1]), [0, 1, 2]);
    }
}

#[test]
fn mirostat_v1_derives_k_from_an_exact_zipf_law() {
    // p_i ~ (i + 1)^-s has exponent s exactly, whatever the number of tokens looked at.
    for (s, tau) in [(1.3f64, 2.0f32), (1.0, 2.5), (0.8, 3.0)] {
        let n = 500usize;
        let logits: Vec<f32> = (1..=n).map(|rank| (-s * (rank as f64).ln()) as f32).collect();
        let e = s - 1.0;
        let scale = if s == 1.0 { 1.0 / (n as f64).ln() } else { e / (1.0 - (n as f64).powf(-e)) };
        let k = (scale * 2f64.powf(2.0 * f64::from(tau))).powf(1.0 / s).round().max(1.0) as u32;
        let kept = support(free().mirostat(Mirostat::V1, tau, 0.0), &logits);
        assert_eq!(kept, (0..k).collect::<Vec<_>>(), "s {s}");
        assert!(k > 1 && k < 50, "k {k} is neither bound");
    }
}

#[test]
fn mirostat_v1_takes_degenerate_distributions() {
    let inf = f32::INFINITY;
    for logits in [vec![0.0], vec![-inf, 1.0, -inf], vec![0.0; 300], vec![1e30, 0.0, -1e30]] {
        let mut sampler = sampler(free().mirostat(Mirostat::V1, 5.0, 0.1), logits.len());
        for _ in 0..50 {
            let token = sampler.sample(&logits).unwrap();
            assert!(logits[token.index()].is_finite());
        }
    }
}

#[test]
fn mirostat_reaches_its_target_surprise() {
    let n = 2000usize;
    let logits: Vec<f32> = (1..=n).map(|rank| -1.1 * (rank as f32).ln()).collect();
    for version in [Mirostat::V1, Mirostat::V2] {
        let mut sampler = sampler(free().mirostat(version, 4.0, 0.1), n);
        let mut bits = 0.0;
        for _ in 0..3000 {
            let token = sampler.sample(&logits).unwrap();
            bits -= f64::from(sampler.logprob(&logits, token).unwrap()) / std::f64::consts::LN_2;
        }
        let mean = bits / 3000.0;
        assert!((mean - 4.0).abs() < 0.1, "{version:?}: {mean} bits");
    }
}

#[test]
fn logprobs_are_of_the_raw_distribution() {
    let params = free().top_k(1).temperature(0.1).logit_bias(TokenId(0), -50.0).presence_penalty(9.0);
    let mut sampler = sampler(params, 5);
    sampler.accept(TokenId(1)).unwrap();
    let mut logits = logits_of(&[0.5, 0.2, 0.2, 0.1, 1.0]);
    logits[4] = f32::NEG_INFINITY;
    let mut out = vec![TokenLogprob { token: TokenId(99), logprob: 0.0 }];
    sampler.top_logprobs(&logits, 3, &mut out).unwrap();
    assert_eq!(out.iter().map(|t| t.token.0).collect::<Vec<_>>(), [0, 1, 2]);
    for (entry, p) in out.iter().zip([0.5f32, 0.2, 0.2]) {
        assert!((entry.logprob - p.ln()).abs() < 1e-6, "{entry:?}");
        assert_eq!(sampler.logprob(&logits, entry.token), Ok(entry.logprob));
    }
    sampler.top_logprobs(&logits, 100, &mut out).unwrap();
    assert_eq!(out.len(), 4, "the impossible token is left out");
    assert_eq!(sampler.logprob(&logits, TokenId(4)), Ok(f32::NEG_INFINITY));
    sampler.top_logprobs(&logits, 0, &mut out).unwrap();
    assert!(out.is_empty());
}

#[test]
fn logits_far_from_zero_do_not_overflow() {
    let mut sampler = sampler(free(), 3);
    let mut out = Vec::new();
    sampler.top_logprobs(&[1e4, 1e4, -1e4], 3, &mut out).unwrap();
    assert!((out[0].logprob + std::f32::consts::LN_2).abs() < 1e-6);
    assert_eq!(out[2].logprob, -2e4 - std::f32::consts::LN_2);
}

/// Logits with many ties, some impossible, at least one possible; up to 700 of them, so that a nucleus
/// spans several sorted blocks.
fn some_logits() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        4 => -4.0f32..4.0,
        2 => (-3i8..3).prop_map(f32::from),
        1 => Just(f32::NEG_INFINITY),
    ]
    .boxed();
    (
        prop_oneof![prop::collection::vec(logit.clone(), 0..12), prop::collection::vec(logit, 400..700)],
        -4.0f32..4.0,
        any::<prop::sample::Index>(),
    )
        .prop_map(|(mut logits, finite, at)| {
            logits.insert(at.index(logits.len() + 1), finite);
            logits
        })
}

fn some_params() -> impl Strategy<Value = SamplingParams> {
    let share = || prop_oneof![Just(0.0f32), Just(1.0f32), 0.0f32..1.0];
    let top_k = prop_oneof![Just(0usize), 1..20usize, 200..800usize];
    (0.05f32..3.0, top_k, share(), share(), share(), any::<u64>()).prop_map(
        |(t, k, top_p, min_p, typical, seed)| {
            SamplingParams::unfiltered()
                .temperature(t)
                .top_k(k)
                .top_p(top_p)
                .min_p(min_p)
                .typical(typical)
                .seed(seed)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: proptest::test_runner::RngSeed::Fixed(28),
        ..ProptestConfig::with_cases(400)
    })]

    #[test]
    fn cuts_leave_the_distribution_of_the_slow_twin(params in some_params(), logits in some_logits()) {
        let mut sampler = sampler(params.clone(), logits.len());
        let token = sampler.sample(&logits).unwrap();
        let expected = twin(&params, &logits);
        let mut got = vec![0.0; logits.len()];
        for (id, p) in sampler.last_distribution() {
            got[id as usize] = p;
        }
        for (id, (got, want)) in got.iter().zip(&expected).enumerate() {
            prop_assert!((got - want).abs() < 1e-9, "token {} has {}, twin {}", id, got, want);
        }
        prop_assert!(expected[token.index()] > 0.0);
    }

    #[test]
    fn top_k_one_is_argmax(params in some_params(), logits in some_logits()) {
        let best = greedy_of(SamplingParams::greedy(), &[], &logits);
        let token = sampler(params.top_k(1), logits.len()).sample(&logits).unwrap();
        prop_assert_eq!(token.0, best);
    }

    #[test]
    fn some_possible_token_always_comes_out_and_buffers_never_grow(
        params in some_params(),
        version in prop::sample::select(vec![Mirostat::Off, Mirostat::V1, Mirostat::V2]),
        logits in some_logits(),
    ) {
        let params = params.mirostat(version, 3.0, 0.5).repeat_penalty(1.1).repeat_last_n(4);
        let mut sampler = sampler(params, logits.len());
        let reserved = sampler.reserved();
        for _ in 0..10 {
            let token = sampler.sample(&logits).unwrap();
            prop_assert!(logits[token.index()].is_finite());
            sampler.accept(token).unwrap();
        }
        prop_assert_eq!(sampler.reserved(), reserved);
    }
}
