//! Every kernel at every level against sums in f64 over decoded weights.

use powerinfer_sparse_ops::block::decode_row;
use powerinfer_testing::tiny::Random;

use super::*;
use crate::input::{Forms, InputBuffers};
use crate::planar::PlanarX;
use crate::pool::Pool;

/// Rows of a type with random bits and sensible scales, at an address that is aligned for the type and no more.
struct FileRow {
    buffer: Vec<u32>,
    offset: usize,
    n_bytes: usize,
}

impl FileRow {
    fn random(random: &mut Random, ty: WeightType, n_cols: usize) -> Self {
        let n_bytes = ty.row_bytes(n_cols).unwrap();
        let mut buffer: Vec<u32> = (0..n_bytes / 4 + 2).map(|_| random.next_u64() as u32).collect();
        let offset = if ty == WeightType::F32 { 4 } else { 2 };
        let bytes = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut buffer)[offset..offset + n_bytes];
        // Where a block keeps its f16 scales.
        let scales: &[usize] = match ty {
            WeightType::F16 | WeightType::Q4_0 | WeightType::Q5_0 | WeightType::Q8_0 | WeightType::IQ4_NL => {
                &[0]
            }
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
            WeightType::Q2_K => &[80, 82],
            WeightType::Q3_K => &[108],
            WeightType::Q6_K => &[208],
            _ => &[],
        };
        for block in bytes.chunks_exact_mut(ty.block_bytes()) {
            for &at in scales {
                let scale = half::f16::from_f32(random.normal());
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
            match ty {
                WeightType::F32 => block.copy_from_slice(&random.normal().to_le_bytes()),
                WeightType::BF16 => {
                    block.copy_from_slice(&half::bf16::from_f32(random.normal()).to_le_bytes())
                }
                WeightType::MXFP4 => block[0] = 120 + random.below(10) as u8,
                _ => {}
            }
        }
        Self { buffer, offset, n_bytes }
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.buffer)[self.offset..self.offset + self.n_bytes]
    }
}

/// The integers and scales of a row of one of the planar types; nothing for the others.
struct Laid {
    quants: Vec<u8>,
    scales: Vec<u16>,
}

impl Laid {
    fn new(ty: WeightType, row: &[u8], n_cols: usize) -> Self {
        let (mut quants, mut scales) = (vec![], vec![]);
        if let Some(kind) = Planar::of(ty) {
            quants.resize(kind.quant_bytes(n_cols), 0);
            scales.resize((row.len() - quants.len()) / 2, 0);
            kind.split(row, &mut quants, &mut scales);
        }
        Self { quants, scales }
    }

    /// The row in the form that its kernel reads.
    fn row<'a>(&'a self, ty: WeightType, file: &'a [u8], n_cols: usize) -> Row<'a> {
        if let Some(kind) = Planar::of(ty) {
            let (scales, mins) = self.scales.split_at(n_cols / 32);
            return Row::Planar(kind, PlanarRow { quants: &self.quants, scales, mins });
        }
        Floats::of_row(ty, file).map_or(Row::Blocks(ty, file), Row::Floats)
    }
}

/// Every number of blocks up to twice what any loop does at once, plus one; and a long one.
fn lengths(ty: WeightType) -> Vec<usize> {
    match ty.block_len() {
        1 => (1..=70).chain([333]).collect(),
        32 => (1..=9).chain([37]).map(|n| n * 32).collect(),
        _ => (1..=5).map(|n| n * 256).collect(),
    }
}

/// The vector as the product with weights of type `ty` sees it.
fn seen(ty: WeightType, x: &Input<'_>, row: usize) -> Vec<f32> {
    match Forms::of(ty) {
        Forms { x8: true, .. } => {
            let [x8] = x.x8s([row]);
            let block = |b: usize| x8.values(b).map(|q| x8.d[b] * f32::from(q));
            (0..x.n_cols() / 32).flat_map(block).collect()
        }
        Forms { x8k: true, .. } => {
            x.x8ks([row])[0].iter().flat_map(|b| b.qs.map(|q| b.d * f32::from(q))).collect()
        }
        _ => x.f32s([row])[0].to_vec(),
    }
}

/// `Σ w · x` and `Σ |w · x|`.
fn reference_dot(w: &[f32], x: &[f32]) -> (f64, f64) {
    let products = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
    (products.clone().sum(), products.map(f64::abs).sum())
}

#[test]
fn dots_match_the_decoded_sum_for_every_type_level_and_length() {
    let mut random = Random::new(1);
    let mut pool = Pool::try_new(1).unwrap();
    for ty in WeightType::ALL {
        for n in lengths(ty) {
            let row = FileRow::random(&mut random, ty, n);
            let x = random.normals(6 * n, 1.0);
            let mut buffers = InputBuffers::default();
            buffers.reserve(6, n);
            let x = buffers.prepare(&mut pool, &x, n, Forms::of(ty));
            let mut w = vec![0.0; n];
            decode_row(ty, row.bytes(), &mut w);
            // Offsets of the types that have them are added apart, and are larger than the sum itself.
            let offset = w.iter().map(|w| f64::from(w.abs())).fold(0.0, f64::max);
            for level in CpuLevel::available() {
                let what = format!("{} dot {ty} of {n}", level.name());
                let rows: [usize; 6] = [5, 0, 1, 2, 3, 4];
                let mut together = [0.0; 6];
                let laid = Laid::new(ty, row.bytes(), n);
                let row = laid.row(ty, row.bytes(), n);
                dot_rows(level, row, &x, &rows, &mut together);
                for (one, got) in rows.into_iter().zip(together) {
                    let [alone] = dot(level, row, &x, [one]);
                    assert_eq!(got.to_bits(), alone.to_bits(), "{what}: in a tile and alone");
                    let seen = seen(ty, &x, one);
                    let (want, size) = reference_dot(&w, &seen);
                    let size = size + offset * seen.iter().map(|x| f64::from(x.abs())).sum::<f64>();
                    let error = (f64::from(got) - want).abs();
                    // A few roundings for each of the partial sums.
                    assert!(error <= size * 1e-6, "{what}: {got}, want {want}, size {size}");
                }
            }
        }
    }
}

/// Halves onto each other.
fn tree(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

/// The rule of a product of floats: 16 sums, and halves onto each other.
fn by_the_rule(w: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0f32; 16];
    for (k, (w, x)) in w.iter().zip(x).enumerate() {
        lanes[k % 16] = w.mul_add(*x, lanes[k % 16]);
    }
    tree(lanes)
}

/// The same for integers apart from scales: a block adds to one of 16 sums.
fn planar_by_the_rule(kind: Planar, row: PlanarRow<'_>, x: PlanarX<'_>) -> f32 {
    let f32_of = |bits: u16| half::f16::from_bits(bits).to_f32();
    let mut lanes = [0f32; 16];
    for (b, d) in row.scales.iter().enumerate() {
        let (u, q) = (row.block(kind, b), x.values(b));
        let dot: i32 = u.iter().zip(q).map(|(u, q)| (i32::from(*u) - kind.offset()) * i32::from(q)).sum();
        let lane = &mut lanes[b % 16];
        *lane = (dot as f32).mul_add(f32_of(*d) * x.d[b], *lane);
        if let Some(m) = row.mins.get(b) {
            *lane = f32_of(*m).mul_add(x.d[b] * x.sums[b] as f32, *lane);
        }
    }
    tree(lanes)
}

#[test]
fn avx512_and_neon_keep_to_one_rule() {
    let mut random = Random::new(7);
    let mut pool = Pool::try_new(1).unwrap();
    for level in CpuLevel::available().into_iter().filter(|l| ["avx512", "neon"].contains(&l.name())) {
        for ty in WeightType::ALL.into_iter().filter(|ty| ty.is_float() || Planar::of(*ty).is_some()) {
            for n in lengths(ty) {
                let file = FileRow::random(&mut random, ty, n);
                let laid = Laid::new(ty, file.bytes(), n);
                let row = laid.row(ty, file.bytes(), n);
                let x = random.normals(n, 1.0);
                let mut buffers = InputBuffers::default();
                buffers.reserve(1, n);
                let x = buffers.prepare(&mut pool, &x, n, Forms::of(ty));
                let want = match row {
                    Row::Planar(kind, row) => planar_by_the_rule(kind, row, x.x8s([0])[0]),
                    _ => {
                        let mut w = vec![0.0; n];
                        decode_row(ty, file.bytes(), &mut w);
                        by_the_rule(&w, x.f32s([0])[0])
                    }
                };
                let [got] = dot(level, row, &x, [0]);
                assert_eq!(got.to_bits(), want.to_bits(), "{} {ty} of {n}", level.name());
            }
        }
    }
}

#[test]
fn axpy_matches_the_decoded_sum_for_every_type_level_and_length() {
    let mut random = Random::new(2);
    for ty in AXPY_TYPES {
        for n in lengths(ty) {
            let rows: [FileRow; AXPY_ROWS] = std::array::from_fn(|_| FileRow::random(&mut random, ty, n));
            let rows = rows.each_ref().map(FileRow::bytes);
            let a: [f32; AXPY_ROWS] = std::array::from_fn(|_| random.normal());
            let start = random.normals(n, 1.0);
            let decoded = rows.map(|row| {
                let mut w = vec![0.0; n];
                decode_row(ty, row, &mut w);
                w
            });
            // One rule for all levels: a fused multiply-add of each exact weight, in order.
            let mut fused = start.clone();
            for (a, w) in a.iter().zip(&decoded) {
                fused.iter_mut().zip(w).for_each(|(acc, w)| *acc = a.mul_add(*w, *acc));
            }
            for level in CpuLevel::available() {
                let what = format!("{} axpy {ty} of {n}", level.name());
                let mut together = start.clone();
                axpy(level, ty, a, rows, &mut together, rows);
                let mut singly = start.clone();
                for (a, row) in a.into_iter().zip(rows) {
                    axpy(level, ty, [a], [row], &mut singly, [&[]]);
                }
                for i in 0..n {
                    assert_eq!(together[i].to_bits(), singly[i].to_bits(), "{what}: at once and one by one");
                    assert_eq!(together[i].to_bits(), fused[i].to_bits(), "{what}: by the rule");
                    let w = decoded.each_ref().map(|w| w[i]);
                    let (sum, size) = reference_dot(&w, &a);
                    let (want, size) = (sum + f64::from(start[i]), size + f64::from(start[i].abs()));
                    let error = (f64::from(together[i]) - want).abs();
                    assert!(error <= size * 1e-6, "{what}: at {i}, {}, want {want}", together[i]);
                }
            }
        }
    }
}

#[test]
fn plain_vectors_may_have_any_length_even_none() {
    for level in CpuLevel::available() {
        let x: Vec<f32> = (0..40).map(|i| i as f32).collect();
        let half: Vec<u16> = x.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect();
        for n in 0..40 {
            // Small integers: every order of summation is exact.
            let want = (0..n).map(|i| i * i).sum::<usize>() as f32;
            let (row, half_row) = (bytemuck::cast_slice(&x[..n]), bytemuck::cast_slice(&half[..n]));
            assert_eq!(dot_f32(level, WeightType::F32, row, &x[..n]), want);
            assert_eq!(dot_f32(level, WeightType::F16, half_row, &x[..n]), want);
            let mut acc = x[..n].to_vec();
            axpy(level, WeightType::F16, [2.0], [half_row], &mut acc, [&[]]);
            assert!((0..n).all(|i| acc[i] == 3.0 * i as f32));
        }
    }
}

#[test]
fn extreme_integers_do_not_overflow() {
    // All weights and inputs at the ends of their ranges; sums stay exact in the kernels' integers.
    let mut pool = Pool::try_new(1).unwrap();
    for sign in [1.0, -1.0] {
        let x = vec![sign * 2.0; 512];
        let mut buffers = InputBuffers::default();
        buffers.reserve(1, 512);
        let x = buffers.prepare(&mut pool, &x, 512, Forms { x8: true, x8k: true });
        for ty in [WeightType::Q8_0, WeightType::Q6_K, WeightType::Q4_K, WeightType::Q5_K, WeightType::Q4_0] {
            for fill in [0x80, 0x7f, 0xff, 0x00] {
                let mut bytes = vec![fill; ty.row_bytes(512).unwrap()];
                let scales: &[usize] = match ty {
                    WeightType::Q6_K => &[208],
                    WeightType::Q4_K | WeightType::Q5_K => &[0, 2],
                    _ => &[0],
                };
                for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                    for &at in scales {
                        block[at..at + 2].copy_from_slice(&half::f16::ONE.to_le_bytes());
                    }
                }
                let mut w = vec![0.0; 512];
                decode_row(ty, &bytes, &mut w);
                let (want, size) = reference_dot(&w, &seen(ty, &x, 0));
                for level in CpuLevel::available() {
                    let laid = Laid::new(ty, &bytes, 512);
                    let [got] = dot(level, laid.row(ty, &bytes, 512), &x, [0]);
                    let error = (f64::from(got) - want).abs();
                    assert!(
                        error <= 1e-5 * (size + 1e4),
                        "{} {ty} {fill:x}: {got}, want {want}",
                        level.name()
                    );
                }
            }
        }
    }
}

#[test]
fn blocks_of_256_are_exact_on_small_integers() {
    // Scales of 1 and inputs that are their own 8-bit form: no sum reaches 2^24, so every level has every bit right.
    let mut pool = Pool::try_new(1).unwrap();
    let mut random = Random::new(4);
    for n in [256, 512, 768] {
        let mut x: Vec<f32> = (0..n).map(|_| random.below(9) as f32 - 4.0).collect();
        x.iter_mut().step_by(256).for_each(|x| *x = -128.0);
        let mut buffers = InputBuffers::default();
        buffers.reserve(1, n);
        let input = buffers.prepare(&mut pool, &x, n, Forms { x8: false, x8k: true });
        for (ty, scales) in [
            (WeightType::Q2_K, &[80, 82][..]),
            (WeightType::Q3_K, &[108]),
            (WeightType::Q4_K, &[0, 2]),
            (WeightType::Q5_K, &[0, 2]),
            (WeightType::Q6_K, &[208]),
        ] {
            let mut bytes: Vec<u8> = (0..ty.row_bytes(n).unwrap()).map(|_| random.next_u64() as u8).collect();
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                for &at in scales {
                    block[at..at + 2].copy_from_slice(&half::f16::ONE.to_le_bytes());
                }
            }
            let mut w = vec![0.0; n];
            decode_row(ty, &bytes, &mut w);
            let (want, _) = reference_dot(&w, &x);
            for level in CpuLevel::available() {
                let got = dot(level, Row::Blocks(ty, &bytes), &input, [0, 0]);
                assert_eq!(got.map(f64::from), [want; 2], "{} {ty} of {n}", level.name());
            }
        }
    }
}

#[test]
fn scaled_rows_match_the_sum_and_zero_factors_change_nothing() {
    let mut random = Random::new(3);
    for n in (1..=70).chain([333]) {
        let values: Vec<i8> = (0..32 * n).map(|_| random.next_u64() as i8).collect();
        let scales: Vec<half::f16> = (0..n).map(|_| half::f16::from_f32(random.normal())).collect();
        let scale_bits: Vec<u16> = scales.iter().map(|s| s.to_bits()).collect();
        let start = random.normals(n, 1.0);
        for n_terms in [0, 1, 5, 32] {
            let terms: Vec<(usize, f32)> =
                (0..n_terms).map(|row| (row, if row % 3 == 1 { 0.0 } else { random.normal() })).collect();
            let fired: Vec<(usize, f32)> = terms.iter().copied().filter(|t| t.1 != 0.0).collect();
            for level in CpuLevel::available() {
                let mut all = start.clone();
                axpy_scaled(level, &terms, &scale_bits, &values, &mut all);
                let mut some = start.clone();
                axpy_scaled(level, &fired, &scale_bits, &values, &mut some);
                assert_eq!(all, some, "{} of {n}", level.name());
                for i in 0..n {
                    let (w, a): (Vec<f32>, Vec<f32>) = terms
                        .iter()
                        .map(|&(row, a)| (scales[i].to_f32() * f32::from(values[row * n + i]), a))
                        .unzip();
                    let (sum, size) = reference_dot(&w, &a);
                    let error = (f64::from(all[i]) - sum - f64::from(start[i])).abs();
                    assert!(error <= (size + 1.0) * 1e-6, "{} of {n} at {i}: off by {error}", level.name());
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512_forms {
    //! The forms for several rows that only AVX-512 has.

    use super::*;
    use crate::kernel::avx512::{axpy, float};
    use crate::level::Avx512;

    const FLOATS: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];

    fn check_tile<const R: usize, const T: usize>(
        level: Avx512,
        rows: &[Floats<'_>],
        x: &[&[f32]],
        want: &[Vec<f32>],
    ) {
        let tile =
            float::dot_tile::<R, T>(level, std::array::from_fn(|r| rows[r]), std::array::from_fn(|t| x[t]));
        for (r, t) in (0..R).flat_map(|r| (0..T).map(move |t| (r, t))) {
            assert_eq!(tile[r][t].to_bits(), want[r][t].to_bits(), "{R} x {T} of {}: {r}, {t}", x[0].len());
        }
    }

    #[test]
    fn products_keep_to_the_rule_for_every_type_length_and_tile() {
        let Some(level) = Avx512::detect() else { return };
        let mut random = Random::new(4);
        let mut scratch = vec![f32::NAN; float::GEMM_SCRATCH];
        // 1024 columns are converted at once; 3000 columns pass in batches of 88.
        for (n, n_rows, n_tokens) in
            (0..=70).map(|n| (n, 8, 6)).chain([(333, 13, 131), (1024, 8, 6), (1025, 9, 6), (3000, 8, 93)])
        {
            for ty in FLOATS {
                let rows: Vec<FileRow> = (0..n_rows).map(|_| FileRow::random(&mut random, ty, n)).collect();
                let decoded: Vec<Vec<f32>> = rows
                    .iter()
                    .map(|row| {
                        let mut w = vec![0.0; n];
                        decode_row(ty, row.bytes(), &mut w);
                        w
                    })
                    .collect();
                let rows: Vec<Floats<'_>> =
                    rows.iter().map(|r| Floats::of_row(ty, r.bytes()).unwrap()).collect();
                let flat = random.normals(n_tokens * n, 1.0);
                let x: Vec<&[f32]> = (0..n_tokens).map(|t| &flat[t * n..][..n]).collect();
                let want: Vec<Vec<f32>> =
                    decoded.iter().map(|w| x.iter().map(|x| by_the_rule(w, x)).collect()).collect();
                check_tile::<1, 1>(level, &rows, &x, &want);
                check_tile::<1, 4>(level, &rows, &x, &want);
                check_tile::<2, 3>(level, &rows, &x, &want);
                check_tile::<4, 1>(level, &rows, &x, &want);
                check_tile::<5, 2>(level, &rows, &x, &want);
                check_tile::<6, 4>(level, &rows, &x, &want);
                check_tile::<8, 1>(level, &rows, &x, &want);
                let mut n_calls = 0;
                let tokens = 1..n_tokens;
                float::gemm(level, &rows, &flat, n, tokens.clone(), &mut scratch, |token, row, got| {
                    n_calls += 1;
                    assert!(tokens.contains(&token));
                    assert_eq!(got.to_bits(), want[row][token].to_bits(), "gemm {ty} of {n}: {row}, {token}");
                });
                assert_eq!(n_calls, n_rows * tokens.len());
            }
        }
    }

    #[test]
    fn faults_of_one_row_or_vector_stay_with_it() {
        let Some(level) = Avx512::detect() else { return };
        let (n, good) = (19, vec![1f32; 19]);
        let flat: Vec<f32> = (0..3 * n).map(|i| if i / n == 1 { f32::NAN } else { 1.0 }).collect();
        let mut scratch = vec![f32::NAN; float::GEMM_SCRATCH];
        float::gemm(level, &[Floats::F32(&good)], &flat, n, 0..3, &mut scratch, |token, _, got| {
            assert!(if token == 1 { got.is_nan() } else { got == 19.0 });
        });
    }

    #[test]
    fn eight_rows_are_added_as_one_by_one() {
        let Some(level) = Avx512::detect() else { return };
        let mut random = Random::new(5);
        for ty in AXPY_TYPES {
            for n in lengths(ty) {
                let rows: [FileRow; 8] = std::array::from_fn(|_| FileRow::random(&mut random, ty, n));
                let rows = rows.each_ref().map(FileRow::bytes);
                let a: [f32; 8] = std::array::from_fn(|_| random.normal());
                let mut singly = random.normals(n, 1.0);
                let mut together = singly.clone();
                axpy::axpy(level, ty, a, rows, &mut together, rows);
                a.into_iter()
                    .zip(rows)
                    .for_each(|(a, row)| axpy::axpy(level, ty, [a], [row], &mut singly, [&[]]));
                assert!(together.iter().zip(&singly).all(|(a, b)| a.to_bits() == b.to_bits()), "{ty} of {n}");
            }
        }
    }

    #[test]
    fn bands_of_a_tile_have_the_bits_of_row_by_row() {
        let Some(level) = Avx512::detect() else { return };
        let mut random = Random::new(6);
        for ty in AXPY_TYPES {
            for (n, n_rows) in lengths(ty).into_iter().zip((1..=33).cycle()) {
                let rows: Vec<FileRow> = (0..n_rows).map(|_| FileRow::random(&mut random, ty, n)).collect();
                let rows: Vec<&[u8]> = rows.iter().map(FileRow::bytes).collect();
                let n_tokens = axpy::DOWN_TILE;
                let mut h = random.normals(n_tokens * n_rows, 1.0);
                h.iter_mut().step_by(3).for_each(|h| *h = 0.0);
                let tile: [&[f32]; axpy::DOWN_TILE] = std::array::from_fn(|t| &h[t * n_rows..][..n_rows]);
                let start = random.normals(n_tokens * n, 1.0);
                let mut want = start.clone();
                for (acc, h) in want.chunks_mut(n).zip(h.chunks(n_rows)) {
                    h.iter().zip(&rows).for_each(|(&a, row)| axpy::axpy(level, ty, [a], [row], acc, [&[]]));
                }
                for first in [0, n / 64 * 32] {
                    let mut bands = vec![f32::NAN; (n - first).div_ceil(axpy::BAND) * n_rows * axpy::BAND];
                    axpy::decode_bands(level, ty, &rows, first..n, &mut bands);
                    let mut tiles = start.clone();
                    for (b, band) in bands.chunks(n_rows * axpy::BAND).enumerate() {
                        let columns = first + b * axpy::BAND..n.min(first + (b + 1) * axpy::BAND);
                        let mut acc = tiles.chunks_mut(n).map(|acc| &mut acc[columns.clone()]);
                        axpy::down_tile(level, band, tile, std::array::from_fn(|_| acc.next().unwrap()));
                    }
                    let what = format!("{n_rows} rows {ty} of {n} from {first}");
                    for (i, want) in want.iter().enumerate().filter(|(i, _)| i % n >= first) {
                        assert_eq!(tiles[i].to_bits(), want.to_bits(), "{what}: tile at {i}");
                    }
                }
            }
        }
    }
}
