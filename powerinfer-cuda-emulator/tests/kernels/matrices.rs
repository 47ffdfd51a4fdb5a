//! Kernels that read weight matrices, against the scalar decoders and sums in f64.

use crate::device::*;
use powerinfer_sparse_ops::WeightType;

/// Row lengths that a type can have, odd ones where it may.
fn widths(ty: WeightType) -> &'static [usize] {
    match ty.block_len() {
        1 => &[1, 7, 8, 24, 33, 72, 256, 300],
        32 => &[32, 96, 320],
        _ => &[256, 768],
    }
}

#[test]
fn embedding_rows_have_the_bits_of_the_decoder() {
    if !can_run() {
        return;
    }
    let mut random = Random(1);
    for ty in TYPES {
        for &n_embd in widths(ty) {
            let table = random.matrix(ty, 9, n_embd);
            let rows = decode(&table);
            let ids: Vec<u32> = (0..5).map(|_| random.below(7) as u32).collect();
            let got: Vec<f32> = on_device(|d| {
                let (t, i, y) = (d.upload(table.bytes()), d.upload(&ids), d.alloc::<f32>(5 * n_embd));
                let args = |offset, add| [t, i, y, int(n_embd), int(5), int(offset), int(add)];
                d.launch(&format!("embed_{}", name(ty)), [5, 1, 1], 128, &args(0, 0));
                d.launch(&format!("embed_{}", name(ty)), [5, 1, 1], 128, &args(2, 1));
                d.download(y, 5 * n_embd)
            });
            for (token, &id) in ids.iter().enumerate() {
                for i in 0..n_embd {
                    let want = rows[id as usize][i] + rows[id as usize + 2][i];
                    assert_eq!(got[token * n_embd + i].to_bits(), want.to_bits(), "{ty} {n_embd}");
                }
            }
        }
    }
}

#[test]
fn products_are_right_and_do_not_depend_on_the_batch() {
    if !can_run() {
        return;
    }
    let mut random = Random(2);
    for ty in TYPES {
        for (case, &n_in) in widths(ty).iter().enumerate() {
            let n_out = [1, 13, 16, 70][case % 4];
            let w = random.matrix(ty, n_out, n_in);
            let rows = decode(&w);
            let bias = random.floats(n_out);
            let x_stride = if ty.block_len() == 1 { n_in + case % 3 } else { n_in + 4 };
            let mut alone: Vec<Vec<f32>> = Vec::new();
            for n_tokens in [1, 3, 8, 11] {
                let mut x = Random(n_in as u64).floats(11 * x_stride);
                x.truncate(n_tokens * x_stride);
                let (y_stride, flags) = (n_out + 3, 0);
                let got: Vec<f32> = on_device(|d| {
                    let (w, x, b) = (d.upload(w.bytes()), d.upload(&x), d.upload(&bias));
                    let y = d.alloc::<f32>(n_tokens * y_stride);
                    let args = [
                        w,
                        x,
                        b,
                        y,
                        int(n_out),
                        int(n_in),
                        int(n_tokens),
                        int(x_stride),
                        int(y_stride),
                        int(flags),
                    ];
                    let grid = [n_out.div_ceil(8), n_tokens.div_ceil(8), 1];
                    let kernel = if n_tokens == 1 { "matvec_one" } else { "matvec" };
                    d.launch(&format!("{kernel}_{}", name(ty)), grid, 128, &args);
                    d.download(y, n_tokens * y_stride)
                });
                for t in 0..n_tokens {
                    let y = &got[t * y_stride..][..n_out];
                    if t == alone.len() {
                        alone.push(y.to_vec());
                    }
                    assert_eq!(y, alone[t], "{ty} {n_in}: token {t} of {n_tokens}");
                    for o in 0..n_out {
                        let (want, magnitude) = dot(&rows[o], &x[t * x_stride..]);
                        let want = want + f64::from(bias[o]);
                        assert_close(y[o], want, magnitude + 1.0, format!("{ty} {n_in}, token {t}, row {o}"));
                    }
                    assert!(got[t * y_stride + n_out..(t + 1) * y_stride].iter().all(|v| v.is_nan()));
                }
                if n_tokens == 1 {
                    continue;
                }
                let (w, bias) = (&w, &bias);
                let tiled: Vec<f32> = on_device(|d| {
                    let (w, x, b) = (d.upload(w.bytes()), d.upload(&x), d.upload(bias));
                    let y = d.alloc::<f32>(n_tokens * y_stride);
                    let args = [
                        w,
                        x,
                        b,
                        y,
                        int(n_out),
                        int(n_in),
                        int(n_tokens),
                        int(x_stride),
                        int(y_stride),
                        int(flags),
                    ];
                    let grid = [n_out.div_ceil(64), n_tokens.div_ceil(64), 1];
                    d.launch(&format!("matmul_{}", name(ty)), grid, 256, &args);
                    d.download(y, n_tokens * y_stride)
                });
                for t in 0..n_tokens {
                    for o in 0..n_out {
                        let (want, magnitude) = dot(&rows[o], &x[t * x_stride..]);
                        let want = want + f64::from(bias[o]);
                        assert_close(
                            tiled[t * y_stride + o],
                            want,
                            magnitude + 1.0,
                            format!("matmul {ty} {n_in}"),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn flags_add_to_the_output_and_cut_off_what_is_negative() {
    if !can_run() {
        return;
    }
    let mut random = Random(4);
    let (n_out, n_in, n_tokens) = (11, 40, 3);
    let w = random.matrix(WeightType::F32, n_out, n_in);
    let (x, before) = (random.floats(n_tokens * n_in), random.floats(n_tokens * n_out));
    let run = |kernel: &str, side: usize, threads, flags: usize| -> Vec<f32> {
        on_device(|d| {
            let (w, x, y) = (d.upload(w.bytes()), d.upload(&x), d.upload(&before));
            let shape = [n_out, n_in, n_tokens, n_in, n_out, flags].map(int);
            let args = [&[w, x, NONE, y], &shape[..]].concat();
            let grid = [n_out.div_ceil(side), n_tokens.div_ceil(side), 1];
            d.launch(&format!("{kernel}_f32"), grid, threads, &args);
            d.download(y, n_tokens * n_out)
        })
    };
    for (kernel, side, threads) in [("matvec", 8, 128), ("matmul", 64, 256)] {
        let plain = run(kernel, side, threads, 0);
        assert!(plain.iter().any(|v| *v < 0.0) && plain.iter().any(|v| *v > 0.0));
        let rectified: Vec<f32> = plain.iter().map(|v| v.max(0.0)).collect();
        let added = |values: &[f32]| before.iter().zip(values).map(|(b, v)| b + v).collect::<Vec<f32>>();
        assert_eq!(run(kernel, side, threads, 2), rectified);
        assert_eq!(run(kernel, side, threads, 1), added(&plain));
        assert_eq!(run(kernel, side, threads, 3), added(&rectified));
    }
}
