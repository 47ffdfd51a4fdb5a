//! Against sums in f64 over the decoded weights; the matrix product against `dot`, bit for bit.

use half::f16;
use powerinfer_testing::tiny::Random;

use super::*;

/// A matrix and vectors, as plain numbers and in the planar forms.
struct Case {
    kind: Planar,
    n_blocks: usize,
    quants: Vec<u8>,
    scales: Vec<u16>,
    mins: Vec<u16>,
    w: Vec<f64>,
    x_q: Vec<i8>,
    x_d: Vec<f32>,
    x_sums: Vec<i32>,
    x: Vec<f64>,
}

/// Where element `e` of block `b` is in a row of 8-bit weights of `n` blocks.
fn place(n: usize, b: usize, e: usize) -> usize {
    let in_group = (n - b / 4 * 4).min(4);
    b / 4 * 128 + (e / 16 * in_group + b % 4) * 16 + e % 16
}

impl Case {
    /// `weight` and `input` draw the integers.
    fn new(
        random: &mut Random,
        kind: Planar,
        (n_blocks, n_rows, n_x): (usize, usize, usize),
        weight: impl Fn(&mut Random) -> u8,
        input: impl Fn(&mut Random) -> i8,
    ) -> Self {
        let n_pad = n_blocks.next_multiple_of(16);
        let n_bytes = n_blocks * if kind == Planar::Q8_0 { 32 } else { 16 };
        let mut case = Self {
            kind,
            n_blocks,
            quants: vec![0; n_rows * n_bytes],
            scales: (0..n_rows * n_blocks).map(|_| f16::from_f32(random.normal()).to_bits()).collect(),
            mins: Vec::new(),
            w: Vec::new(),
            x_q: vec![0; n_x * n_pad * 32],
            x_d: vec![0.0; n_x * n_pad],
            x_sums: vec![0; n_x * n_pad],
            x: Vec::new(),
        };
        if kind == Planar::Q4_1 {
            case.mins = (0..n_rows * n_blocks).map(|_| f16::from_f32(random.normal()).to_bits()).collect();
        }
        let number = |bits: u16| f16::from_bits(bits).to_f64();
        for (r, row) in case.quants.chunks_exact_mut(n_bytes).enumerate() {
            for b in 0..n_blocks {
                for e in 0..32 {
                    let u = weight(random);
                    let block = r * n_blocks + b;
                    let (u, m) = match kind {
                        Planar::Q8_0 => (u, 0.0),
                        Planar::Q4_0 => (u % 16, 0.0),
                        Planar::Q4_1 => (u % 16, number(case.mins[block])),
                    };
                    if kind == Planar::Q8_0 {
                        row[place(n_blocks, b, e)] = u;
                    } else {
                        row[b * 16 + e % 16] |= u << (e / 16 * 4);
                    }
                    let q = f64::from(i32::from(u) - kind.offset());
                    case.w.push(number(case.scales[block]) * q + m);
                }
            }
        }
        for t in 0..n_x {
            for b in 0..n_blocks {
                let d = random.normal();
                case.x_d[t * n_pad + b] = d;
                for e in 0..32 {
                    let q = input(random);
                    case.x_q[t * n_pad * 32 + place(n_pad, b, e)] = q;
                    case.x_sums[t * n_pad + b] += i32::from(q);
                    case.x.push(f64::from(d) * f64::from(q));
                }
            }
        }
        case
    }

    fn rows(&self) -> Vec<PlanarRow<'_>> {
        let n = self.n_blocks;
        let n_bytes = n * if self.kind == Planar::Q8_0 { 32 } else { 16 };
        let n_mins = if self.kind == Planar::Q4_1 { n } else { 0 };
        (0..self.scales.len() / n)
            .map(|r| PlanarRow {
                quants: &self.quants[r * n_bytes..][..n_bytes],
                scales: &self.scales[r * n..][..n],
                mins: &self.mins[r * n_mins..][..n_mins],
            })
            .collect()
    }

    fn xs(&self) -> Vec<PlanarX<'_>> {
        let n = self.n_blocks.next_multiple_of(16);
        (0..self.x_d.len() / n)
            .map(|t| PlanarX {
                q: &self.x_q[t * n * 32..][..n * 32],
                d: &self.x_d[t * n..][..n],
                sums: &self.x_sums[t * n..][..n],
            })
            .collect()
    }

    /// The product and the sum of the sizes of its parts, offsets apart.
    fn want(&self, row: usize, t: usize) -> (f64, f64) {
        let n = self.n_blocks * 32;
        let (w, x) = (&self.w[row * n..][..n], &self.x[t * n..][..n]);
        let offset = w.iter().map(|w| w.abs()).fold(0.0, f64::max);
        let sum = w.iter().zip(x).map(|(w, x)| w * x).sum();
        (sum, w.iter().zip(x).map(|(w, x)| (w * x).abs() + offset * x.abs()).sum())
    }

    /// Products `[n_x, n_rows]` of the matrix product.
    fn gemm(&self, level: Avx512) -> Vec<f32> {
        let (rows, xs) = (self.rows(), self.xs());
        let mut out = vec![f32::NAN; xs.len() * rows.len()];
        let mut panel = vec![Line::zeroed(); panel_lines(self.kind, self.n_blocks)];
        let mut tile = vec![Cell::zeroed(); TILE_ROWS * self.n_blocks];
        for (p, panel_rows) in rows.chunks(PANEL_ROWS).enumerate() {
            pack_panel(level, self.kind, panel_rows, &mut panel);
            for (i, xs) in xs.chunks(TILE_ROWS).enumerate() {
                let tile = &mut tile[..xs.len() * self.n_blocks];
                pack_x(self.kind, xs, tile);
                gemm(level, self.kind, &panel, tile, xs.len(), &mut |t, sums| {
                    let at = (i * TILE_ROWS + t) * rows.len() + p * PANEL_ROWS;
                    out[at..][..panel_rows.len()].copy_from_slice(&sums[..panel_rows.len()]);
                });
            }
        }
        out
    }

    /// The bytes of the rows one after the other, at an even distance, and that distance.
    fn packed(&self) -> (Vec<u16>, usize) {
        let rows = self.rows();
        let packed = |row: &PlanarRow<'_>| {
            let quants: &[u16] = bytemuck::cast_slice(row.quants);
            [quants, row.scales, row.mins, &[7]].concat()
        };
        let rows: Vec<Vec<u16>> = rows.iter().map(packed).collect();
        (rows.concat(), 2 * rows[0].len())
    }

    /// Many rows at once have the bits of each alone, whatever is asked for meanwhile.
    fn check_bands_and_lists(&self, level: Avx512) {
        let (rows, x) = (self.rows(), self.xs()[0]);
        let (packed, stride) = self.packed();
        let bytes = bytemuck::cast_slice(&packed);
        let w = PlanarRows { kind: self.kind, bytes, stride, n_cols: 32 * self.n_blocks };
        let want: Vec<u32> = rows
            .iter()
            .map(|row| {
                let [sum] = dot(level, self.kind, *row, [x]);
                sum.to_bits()
            })
            .collect();
        let n = rows.len();
        let mut out = vec![f32::NAN; n];
        dot_band(level, w, |i| n - 1 - i, |i| (i % 3 != 0).then_some(i), x, &mut out);
        assert!((0..n).all(|i| out[i].to_bits() == want[n - 1 - i]), "{:?}: a band", self.kind);
        let list: Vec<u32> = (0..n as u32).step_by(2).collect();
        let mut asks = Asks::<2>::default();
        asks.push(&bytes[..3]);
        asks.push(w.bytes(n - 1));
        dot_list(level, w, &list, x, &mut out[..list.len()], &mut asks);
        let got = out.iter().zip(&list).all(|(out, &row)| out.to_bits() == want[row as usize]);
        assert!(got, "{:?}: a list", self.kind);
    }

    fn check(&self, level: Avx512) {
        self.check_bands_and_lists(level);
        let (rows, xs) = (self.rows(), self.xs());
        let what =
            format!("{:?}, {} blocks, {} rows, {} vectors", self.kind, self.n_blocks, rows.len(), xs.len());
        let got = self.gemm(level);
        for (r, &row) in rows.iter().enumerate() {
            let mut alone = Vec::new();
            for (t, &x) in xs.iter().enumerate() {
                let [sum] = dot(level, self.kind, row, [x]);
                assert_eq!(sum.to_bits(), got[t * rows.len() + r].to_bits(), "{what}: row {r}, vector {t}");
                let (want, size) = self.want(r, t);
                let error = (f64::from(sum) - want).abs();
                assert!(error <= size * 1e-6, "{what}: {sum}, want {want}, size {size}");
                alone.push(sum);
            }
            for (four, alone) in xs.as_chunks::<4>().0.iter().zip(alone.as_chunks::<4>().0) {
                let sums = dot(level, self.kind, row, *four);
                assert_eq!(sums.map(f32::to_bits), alone.map(f32::to_bits), "{what}");
                let two = dot(level, self.kind, row, [four[1], four[2]]);
                assert_eq!(two.map(f32::to_bits), [alone[1], alone[2]].map(f32::to_bits), "{what}");
            }
        }
    }
}

const KINDS: [Planar; 3] = [Planar::Q8_0, Planar::Q4_0, Planar::Q4_1];

fn any_weight(random: &mut Random) -> u8 {
    random.below(256) as u8
}

fn any_input(random: &mut Random) -> i8 {
    random.below(256) as u8 as i8
}

#[test]
fn products_match_the_decoded_sum_and_each_other_for_every_length() {
    let Some(level) = Avx512::detect() else { return };
    let mut random = Random::new(1);
    for kind in KINDS {
        for n_blocks in (1..=34).chain([64]) {
            let n_rows = 1 + random.below(17);
            let shape = (n_blocks, n_rows, 4 + random.below(5));
            Case::new(&mut random, kind, shape, any_weight, any_input).check(level);
        }
    }
}

#[test]
fn products_match_for_every_number_of_rows_and_vectors() {
    let Some(level) = Avx512::detect() else { return };
    let mut random = Random::new(2);
    for kind in KINDS {
        for n_rows in 1..=17 {
            Case::new(&mut random, kind, (7, n_rows, 3), any_weight, any_input).check(level);
        }
        for n_x in 1..=20 {
            Case::new(&mut random, kind, (19, 3, n_x), any_weight, any_input).check(level);
        }
    }
}

#[test]
fn extreme_integers_do_not_overflow() {
    let Some(level) = Avx512::detect() else { return };
    let mut random = Random::new(3);
    for kind in KINDS {
        for u in [0, 255] {
            for q in [-128, -127, 127] {
                Case::new(&mut random, kind, (21, 2, 5), |_| u, |_| q).check(level);
            }
        }
    }
}
