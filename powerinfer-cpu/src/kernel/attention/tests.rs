use half::f16;
use powerinfer_testing::tiny::Random;

use super::*;

/// Shares of scores that are no larger than 0: their exponentials.
fn exps(level: CpuLevel, x: [f32; POSITIONS]) -> [f32; POSITIONS] {
    let mut scores: ByPosition = bytemuck::cast(x);
    softmax(level, &mut scores, POSITIONS, &mut Running { max: 0.0, sum: 0.0 });
    bytemuck::cast(scores)
}

#[test]
fn exponentials_are_within_two_ulp() {
    for level in CpuLevel::available() {
        let mut worst = 0f64;
        // Dense near 0, and down to where the result has few bits left.
        for i in 0..40_000 {
            let x: [f32; POSITIONS] = std::array::from_fn(|p| {
                let at = (i * POSITIONS + p) as f32 / (40_000 * POSITIONS) as f32;
                -at * if i % 2 == 0 { 104.0 } else { 2.0 }
            });
            for (x, got) in x.into_iter().zip(exps(level, x)) {
                let want = f64::from(x).exp();
                // Of a float at `want`; the smallest are 2^-149 apart.
                let ulp = 2f64.powi((want.log2().floor() as i32 - 23).max(-149));
                worst = worst.max((f64::from(got) - want).abs() / ulp);
            }
        }
        assert!(worst <= 2.0, "{}: {worst} ulp", level.name());
        let mut x = [0.0; POSITIONS];
        (x[1], x[2], x[3], x[4]) = (f32::NEG_INFINITY, f32::NAN, -1e30, -0.0);
        let got = exps(level, x);
        assert_eq!((got[0], got[1], got[3], got[4], got[31]), (1.0, 0.0, 0.0, 1.0, 1.0), "{}", level.name());
        assert!(got[2].is_nan(), "{}", level.name());
    }
    assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, 0.0));
    assert!(exp(f32::NAN).is_nan());
    assert_eq!(exp(200.0), f32::INFINITY);
}

#[test]
fn softmax_counts_what_is_there_and_keeps_the_maximum() {
    for level in CpuLevel::available() {
        for n in 1..=POSITIONS {
            let x: [f32; POSITIONS] = std::array::from_fn(|p| if p < n { (p % 5) as f32 } else { f32::NAN });
            let mut scores: ByPosition = bytemuck::cast(x);
            let mut running = Running { max: 2.5, sum: 3.0 };
            let shrink = softmax(level, &mut scores, n, &mut running);
            let max = x[..n].iter().copied().fold(2.5, f32::max);
            assert_eq!(running.max, max);
            assert!((shrink - (2.5 - max).exp()).abs() < 1e-6);
            let shares: [f32; POSITIONS] = bytemuck::cast(scores);
            let sum: f32 = shares[..n].iter().sum();
            assert!((running.sum - 3.0 * shrink - sum).abs() < 1e-5, "{} of {n}", level.name());
            for p in 0..POSITIONS {
                let want = if p < n { (x[p] - max).exp() } else { 0.0 };
                assert!((shares[p] - want).abs() < 1e-6, "{} of {n}, at {p}", level.name());
            }
        }
        // Nothing but −∞ so far, and then a number.
        let mut running = Running::NONE;
        let mut scores = [Line([f32::NEG_INFINITY; 16]); 2];
        softmax(level, &mut scores, 4, &mut running);
        assert_eq!((running.max, running.sum), (f32::NEG_INFINITY, 0.0), "{}", level.name());
        let mut scores = [Line([7.0; 16]); 2];
        assert_eq!(softmax(level, &mut scores, 1, &mut running), 0.0);
        assert_eq!((running.max, running.sum), (7.0, 1.0), "{}", level.name());
    }
}

#[test]
fn widening_is_exact_for_every_length() {
    let mut random = Random::new(3);
    for row_len in 1..=70 {
        for n_rows in [1, 3] {
            let x = random.normals(n_rows * row_len, 1.0);
            let half: Vec<u16> = x.iter().map(|&x| f16::from_f32(x).to_bits()).collect();
            let blocks: Vec<BlockQ8_0> = (0..n_rows * row_len.div_ceil(32))
                .map(|_| BlockQ8_0 {
                    d: f16::from_f32(random.normal()),
                    qs: std::array::from_fn(|_| random.next_u64() as i8),
                })
                .collect();
            for level in CpuLevel::available() {
                let check = |kept: Kept<'_>, want: &dyn Fn(usize) -> f32| {
                    let mut to = vec![Line([f32::NAN; 16]); n_rows * lines(row_len)];
                    widen(level, kept, row_len, &mut to);
                    for (r, row) in to.chunks_exact(lines(row_len)).enumerate() {
                        for i in 0..row_len {
                            let got = row[i / 16].0[i % 16];
                            assert_eq!(got, want(r * row_len + i), "{}, row of {row_len}", level.name());
                        }
                    }
                };
                check(Kept::F32(&x), &|i| x[i]);
                check(Kept::F16(&half), &|i| f16::from_bits(half[i]).to_f32());
                if row_len % 32 == 0 {
                    check(Kept::Values(&blocks), &|i| {
                        blocks[i / 32].d.to_f32() * f32::from(blocks[i / 32].qs[i % 32])
                    });
                }
            }
        }
    }
    for n in 1..=5 {
        let blocks: Vec<BlockKeys> = (0..n)
            .map(|_| BlockKeys {
                d: std::array::from_fn(|_| f16::from_f32(random.normal()).to_bits()),
                q: std::array::from_fn(|_| std::array::from_fn(|_| random.next_u64() as i8)),
            })
            .collect();
        for level in CpuLevel::available() {
            let mut to = vec![Line::ZERO; n * 64];
            widen(level, Kept::Keys(&blocks), POSITIONS, &mut to);
            for (i, got) in bytemuck::cast_slice::<Line, f32>(&to).iter().enumerate() {
                let (block, dim, p) = (&blocks[i / 1024], i / 32 % 32, i % 32);
                assert_eq!(*got, f16::from_bits(block.d[p]).to_f32() * f32::from(block.q[dim][p]));
            }
        }
    }
}

#[test]
fn blocks_of_queries_match_sums_in_f64_and_the_same_queries_alone() {
    let mut random = Random::new(4);
    for n_dims in [1, 7, 16, 40, 80, 96, 160] {
        let n_lines = lines(n_dims);
        let q: Vec<[f32; QUERIES]> = (0..n_dims).map(|_| std::array::from_fn(|_| random.normal())).collect();
        let mut by_position =
            || -> ByPosition { bytemuck::cast::<[f32; 32], _>(std::array::from_fn(|_| random.normal())) };
        let k: Vec<ByPosition> = (0..n_dims).map(|_| by_position()).collect();
        let shares: Vec<ByPosition> = (0..QUERIES).map(|_| by_position()).collect();
        let v: Vec<Line> = (0..n_lines * 16).flat_map(|_| by_position()).collect();
        let acc: Vec<Line> = (0..QUERIES * n_lines).map(|_| by_position()[0]).collect();
        let shrink: [f32; QUERIES] = std::array::from_fn(|i| 1.0 / (1 + i) as f32);
        let at = |x: &ByPosition, p: usize| f64::from(x[p / 16].0[p % 16]);
        for level in CpuLevel::available() {
            let what = format!("{}, {n_dims} dimensions", level.name());
            let mut all = [ByPosition::zeroed(); QUERIES];
            scores(level, &q, &k, &mut all);
            for n in 1..=QUERIES {
                let mut some = [ByPosition::zeroed(); QUERIES];
                scores(level, &q, &k, &mut some[..n]);
                for i in 0..n {
                    assert_eq!(some[i].map(|l| l.0), all[i].map(|l| l.0), "{what}, {n} queries");
                    for p in 0..POSITIONS {
                        let terms = q.iter().zip(&k).map(|(q, k)| f64::from(q[i]) * at(k, p));
                        let size: f64 = terms.clone().map(f64::abs).sum();
                        let error = (at(&some[i], p) - terms.sum::<f64>()).abs();
                        assert!(error <= size * 1e-6, "{what}: off by {error}");
                    }
                }
                for (from, to) in [(0, 32), (0, 0), (0, 31), (5, 6), (9, 20)] {
                    let s = Shares { shares: &shares[..n], shrink: &shrink[..n], from, to };
                    let mut mixed = acc[..n * n_lines].to_vec();
                    mix(level, &s, &v, n_lines, &mut mixed);
                    for i in 0..n {
                        let alone = Shares { shares: &shares[i..=i], shrink: &shrink[i..=i], from, to };
                        let mut one = acc[i * n_lines..][..n_lines].to_vec();
                        mix(level, &alone, &v, n_lines, &mut one);
                        for l in 0..n_lines {
                            assert_eq!(one[l].0, mixed[i * n_lines + l].0, "{what}, {n} queries");
                            for lane in 0..16 {
                                let first = f64::from(acc[i * n_lines + l].0[lane]) * f64::from(shrink[i]);
                                let terms = (from..to)
                                    .map(|p| at(&shares[i], p) * f64::from(v[p * n_lines + l].0[lane]));
                                let size: f64 = terms.clone().map(f64::abs).sum::<f64>() + first.abs();
                                let error = (f64::from(one[l].0[lane]) - terms.sum::<f64>() - first).abs();
                                assert!(error <= size * 1e-6, "{what}: off by {error}");
                            }
                        }
                    }
                }
            }
        }
    }
}
