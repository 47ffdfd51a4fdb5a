//! Neurons: hidden values and the sum of down rows, by list and by tile.

use powerinfer_cuda_emulator::Arg;
use powerinfer_sparse_ops::{Activation, ActiveBatch, Gating, NeuronId, NeuronSet, WeightMatrix, WeightType};

use crate::device::*;

/// A layer of which some neurons are held, and tokens.
struct Case {
    activation: Activation,
    gating: Gating,
    skip_zeros: bool,
    with_bits: bool,
    owned: NeuronSet,
    active: ActiveBatch,
    gate: WeightMatrix,
    up: WeightMatrix,
    down: WeightMatrix,
    up_bias: Option<Vec<f32>>,
    x: Vec<f32>,
    chunk_rows: usize,
}

/// How the work is shared out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    List,
    Tile,
    Matmul,
}

use Form::{List, Matmul, Tile};

/// What a launch gives back.
#[derive(Debug, PartialEq)]
struct Results {
    hidden: Vec<f32>,
    y: Vec<f32>,
    /// Eight counters, then how often each neuron fired.
    counters: Vec<u64>,
}

impl Case {
    fn random(random: &mut Random, ty: WeightType, down_ty: WeightType, n_tokens: usize) -> Self {
        let quantised = ty.block_len().max(down_ty.block_len());
        let n_embd = if quantised == 1 { 20 + random.below(30) } else { quantised * (1 + random.below(2)) };
        let n_ff = 20 + random.below(60);
        let owned = NeuronSet::from_ids(n_ff, (0..n_ff as u32).filter(|_| random.below(4) > 0).map(NeuronId));
        let mut active = ActiveBatch::default();
        active.reset(n_tokens, n_ff);
        for row in 0..n_tokens {
            // One neuron that no token has.
            (1..n_ff as u32).filter(|_| random.below(3) > 0).for_each(|j| active.insert(row, NeuronId(j)));
        }
        let with_bits = random.below(3) > 0;
        if !with_bits {
            active.fill();
        }
        let n = owned.len();
        let activation = [Activation::Relu, Activation::Silu, Activation::Gelu][random.below(3)];
        Self {
            activation,
            gating: [Gating::None, Gating::Gate, Gating::GateAndUp][random.below(3)],
            skip_zeros: activation == Activation::Relu && random.below(3) > 0,
            with_bits,
            active,
            gate: random.matrix(ty, n, n_embd),
            up: random.matrix(ty, n, n_embd),
            down: random.matrix(down_ty, n, n_embd),
            up_bias: (random.below(2) == 0).then(|| random.floats(n)),
            x: random.floats(n_tokens * n_embd),
            chunk_rows: [1, 8, 200, 131][random.below(4)],
            owned,
        }
    }

    fn n_embd(&self) -> usize {
        self.up.n_cols()
    }

    fn n_tokens(&self) -> usize {
        self.active.n_rows()
    }

    /// Launches one form; hidden values come back as `[n_tokens, n_owned]`, NaN where there is none.
    fn on(&self, d: &mut Device, form: Form, gate_apart: bool) -> Results {
        let (n_tokens, n_embd, n_owned) = (self.n_tokens(), self.n_embd(), self.owned.len());
        let ids: Vec<u32> = self.owned.ids().iter().map(|id| id.0).collect();
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(|w| d.upload(w.bytes()));
        let (x, own) = (d.upload(&self.x), d.upload(&ids));
        let bias = self.up_bias.as_ref().map_or(NONE, |b| d.upload(b));
        let bits = if self.with_bits { d.upload(self.active.words()) } else { NONE };
        let (list, counts) = (d.alloc::<u32>(n_tokens * n_owned), d.alloc::<u32>(n_tokens));
        let (marks, counters) = (d.upload(&vec![0u32; n_owned]), d.upload(&[0u64; 8]));
        let hidden = d.alloc::<f32>(n_tokens * n_owned);
        let n_chunks = n_owned.div_ceil(self.chunk_rows);
        let part = d.alloc::<f32>(n_tokens * n_chunks * n_embd);
        let y = d.upload(&vec![0.5f32; n_tokens * n_embd]);
        let n_ff = self.owned.n_ff();
        let activation = int(match self.activation {
            Activation::Relu => 0,
            Activation::Silu => 1,
            _ => 2,
        });
        let gating = int(match self.gating {
            Gating::None => 0,
            Gating::Gate => 1,
            Gating::GateAndUp => 2,
        });
        let skip = int(usize::from(self.skip_zeros));
        let (tokens, n_embd_arg, n_owned_arg) = (int(n_tokens), int(n_embd), int(n_owned));
        let compact = [bits, own, list, counts, counters, n_owned_arg, int(n_ff), n_owned_arg, tokens];
        d.launch("compact", [n_tokens, 1, 1], 64, &compact);

        let tile = form != List;
        let name_of =
            |op: &str, form: Form, ty| format!("{op}_{}_{}", format!("{form:?}").to_lowercase(), name(ty));
        let which: &[Arg] = if tile { &[bits, own] } else { &[list, counts] };
        let sizes: &[Arg] =
            if tile { &[n_embd_arg, n_owned_arg, int(n_ff)] } else { &[n_embd_arg, n_owned_arg] };
        let grid = [n_owned.div_ceil(8), if tile { n_tokens.div_ceil(8) } else { n_tokens }, 1];
        let fused = !gate_apart && self.gating != Gating::None;
        // The values of the gate lie where the hidden values will.
        let gate_values = if gate_apart { hidden } else { NONE };
        if gate_apart {
            let args = [
                &[gate, x],
                which,
                &[gate_values, marks, counters],
                sizes,
                &[n_embd_arg, activation, tokens],
            ]
            .concat();
            let form = if tile { Tile } else { List };
            d.launch(&name_of("ffn_gate", form, self.gate.ty()), grid, 128, &args);
        }
        let first = [if fused { gate } else { NONE }, up, bias, x, gate_values];
        let args = [
            &first,
            which,
            &[hidden, marks, counters],
            sizes,
            &[n_embd_arg, activation, gating, skip, tokens],
        ]
        .concat();
        let blocks = |n: usize| [n.div_ceil(64), n_tokens.div_ceil(64), 1];
        let (grid, threads) = if form == Matmul { (blocks(n_owned), 256) } else { (grid, 128) };
        d.launch(&name_of("ffn", form, self.up.ty()), grid, threads, &args);
        let chunks = [int(self.chunk_rows), int(n_chunks)];
        let down_name = name_of("down", form, self.down.ty());
        if form == Matmul {
            let args =
                [&[down, hidden], which, &[y, marks, counters], sizes, &[int(1), skip, tokens]].concat();
            d.launch(&down_name, blocks(n_embd), 256, &args);
        } else {
            let args =
                [&[down, hidden], which, &[part, marks, counters], sizes, &chunks, &[skip, tokens]].concat();
            let grid = [n_embd.div_ceil(1024), n_chunks, if tile { n_tokens.div_ceil(8) } else { n_tokens }];
            d.launch(&down_name, grid, 128, &args);
            let counted = if tile { NONE } else { counts };
            let args = [part, counted, y, n_embd_arg, chunks[0], chunks[1], int(1), tokens];
            d.launch("down_reduce", [n_embd.div_ceil(128), n_tokens, 1], 128, &args);
        }
        d.launch("count_marks", [n_owned.div_ceil(128), 1, 1], 128, &[marks, counters, n_owned_arg]);
        assert!(d.download::<u32>(marks, n_owned).iter().all(|&m| m == 0));
        let fired = d.upload(&vec![0u64; n_ff]);
        let which: [Arg; 2] = if tile { [NONE; 2] } else { [list, counts] };
        let args = [hidden, which[0], which[1], own, fired, n_owned_arg, tokens];
        d.launch("count_fired", [n_owned.div_ceil(128), n_tokens, 1], 128, &args);

        let mut values: Vec<f32> = d.download(hidden, n_tokens * n_owned);
        if !tile {
            let (list, counts): (Vec<u32>, Vec<u32>) =
                (d.download(list, values.len()), d.download(counts, n_tokens));
            let mut by_row = vec![0.0; values.len()];
            for t in 0..n_tokens {
                for i in 0..counts[t] as usize {
                    by_row[t * n_owned + list[t * n_owned + i] as usize] = values[t * n_owned + i];
                }
            }
            values = by_row;
        }
        let counters = [d.download(counters, 8), d.download(fired, n_ff)].concat();
        Results { hidden: values, y: d.download(y, n_tokens * n_embd), counters }
    }

    /// Three orders, the same bits.
    fn run(&self, form: Form, gate_apart: bool) -> Results {
        let n_hidden = self.n_tokens() * self.owned.len();
        let mut bits = on_device(|d| {
            let r = self.on(d, form, gate_apart);
            let floats = r.hidden.iter().chain(&r.y).map(|v| u64::from(v.to_bits()));
            floats.chain(r.counters).collect::<Vec<u64>>()
        });
        let counters = bits.split_off(bits.len() - 8 - self.owned.n_ff());
        let mut hidden: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b as u32)).collect();
        let y = hidden.split_off(n_hidden);
        Results { hidden, y, counters }
    }

    fn check(&self, got: &Results, what: &str) {
        let (n_tokens, n_embd, n_owned) = (self.n_tokens(), self.n_embd(), self.owned.len());
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(decode);
        let mut counters = vec![0u64; 8 + self.owned.n_ff()];
        let mut read = vec![[false; 3]; n_owned];
        for t in 0..n_tokens {
            let x = &self.x[t * n_embd..][..n_embd];
            let (mut want_y, mut size_y) = (vec![0.5; n_embd], vec![0.5; n_embd]);
            for r in 0..n_owned {
                let h = got.hidden[t * n_owned + r];
                if !self.active.contains(t, self.owned.ids()[r]) {
                    assert_eq!(h, 0.0, "{what}: not active");
                    continue;
                }
                counters[4] += 1;
                let act = |v: f64| f64::from(self.activation.apply(v as f32));
                let (g, size_g) = dot(&gate[r], x);
                let (mut u, size_u) = dot(&up[r], x);
                u += self.up_bias.as_ref().map_or(0.0, |b| f64::from(b[r]));
                let is_gated = self.gating != Gating::None;
                let is_skipped = is_gated && self.skip_zeros && act(g) == 0.0;
                let want = match self.gating {
                    Gating::None => act(u),
                    Gating::Gate => act(g) * u,
                    Gating::GateAndUp => act(g) * act(u),
                };
                let size = (1.0 + size_g) * (1.0 + size_u);
                assert_close(h, want, size, format!("{what}: hidden of row {r}, token {t}"));
                let reads_down = !self.skip_zeros || h != 0.0;
                for (k, is_read) in [is_gated, !is_skipped, reads_down].into_iter().enumerate() {
                    counters[k] += u64::from(is_read);
                    read[r][k] |= is_read;
                }
                counters[3] += u64::from(h != 0.0);
                counters[8 + self.owned.ids()[r].index()] += u64::from(h != 0.0);
                for i in 0..n_embd {
                    let term = f64::from(h) * f64::from(down[r][i]);
                    want_y[i] += term;
                    size_y[i] += term.abs();
                }
            }
            for i in 0..n_embd {
                assert_close(
                    got.y[t * n_embd + i],
                    want_y[i],
                    size_y[i],
                    format!("{what}: sum {i}, token {t}"),
                );
            }
        }
        for k in 0..3 {
            counters[5 + k] = read.iter().filter(|r| r[k]).count() as u64;
        }
        assert_eq!(got.counters, counters, "{what}: counters");
    }
}

#[test]
fn neurons_are_the_formula_of_the_model_in_every_form() {
    if !can_run() {
        return;
    }
    let mut random = Random(1);
    for (i, ty) in TYPES.into_iter().enumerate() {
        for round in 0..6 {
            let n_tokens = [1, 2, 8, 11][random.below(4)];
            let case = Case::random(&mut random, ty, TYPES[(i + round) % 7], n_tokens);
            let what = format!(
                "{ty}, {} down, {:?}, {:?}, skip {}, {} tokens",
                case.down.ty(),
                case.activation,
                case.gating,
                case.skip_zeros,
                n_tokens
            );
            let list = case.run(List, false);
            case.check(&list, &format!("list, {what}"));
            let tile = case.run(Tile, false);
            case.check(&tile, &format!("tile, {what}"));
            assert_eq!(list.hidden, tile.hidden, "{what}");
            case.check(&case.run(Matmul, false), &format!("matmul, {what}"));
            if case.gating != Gating::None {
                assert_eq!(case.run(List, true), list, "gate apart, list, {what}");
                assert_eq!(case.run(Tile, true), tile, "gate apart, tile, {what}");
                case.check(&case.run(Matmul, true), &format!("gate apart, matmul, {what}"));
            }
        }
    }
}

#[test]
fn zeros_that_are_skipped_change_no_bit() {
    if !can_run() {
        return;
    }
    let mut random = Random(2);
    for ty in TYPES {
        let mut case = Case::random(&mut random, ty, ty, 5);
        (case.activation, case.gating) = (Activation::Relu, Gating::Gate);
        let runs = [true, false].map(|skip_zeros| {
            case.skip_zeros = skip_zeros;
            [List, Tile, Matmul].map(|form| case.run(form, false))
        });
        for form in 0..3 {
            assert_eq!(runs[0][form].y, runs[1][form].y, "{ty}");
            assert!(runs[0][form].counters[1] < runs[1][form].counters[1], "{ty}");
        }
    }
}

#[test]
fn wide_rows_take_several_blocks_and_long_lists_several_looks() {
    if !can_run() {
        return;
    }
    let mut random = Random(3);
    let (n, n_embd) = (300, 1100);
    let mut case = Case::random(&mut random, WeightType::F16, WeightType::F16, 2);
    case.owned = NeuronSet::all(n);
    case.active.reset(2, n);
    case.active.fill();
    (case.gate, case.up, case.down) = (
        random.matrix(WeightType::F16, n, n_embd),
        random.matrix(WeightType::F16, n, n_embd),
        random.matrix(WeightType::F16, n, n_embd),
    );
    (case.up_bias, case.x, case.chunk_rows) = (None, random.floats(2 * n_embd), 290);
    (case.activation, case.gating, case.skip_zeros) = (Activation::Relu, Gating::Gate, true);
    for form in [List, Tile, Matmul] {
        case.check(&case.run(form, false), &format!("{form:?}"));
    }
}

#[test]
fn a_token_in_a_prompt_has_the_bits_that_it_has_beside_others() {
    if !can_run() {
        return;
    }
    let mut random = Random(4);
    for (i, ty) in TYPES.into_iter().enumerate() {
        let n_tokens = 70;
        let mut case = Case::random(&mut random, ty, TYPES[(i + 3) % 7], n_tokens);
        let whole = case.run(Matmul, false);
        case.check(&whole, &format!("{ty}, {n_tokens} tokens"));
        // The same from token 33 on.
        let (first, n_embd, n_owned) = (33, case.n_embd(), case.owned.len());
        let mut rest = ActiveBatch::default();
        rest.reset(n_tokens - first, case.owned.n_ff());
        let words = case.owned.n_ff().div_ceil(64);
        rest.words_mut().copy_from_slice(&case.active.words()[first * words..]);
        case.active = rest;
        case.x.drain(..first * n_embd);
        let part = case.run(Matmul, false);
        assert_eq!(part.hidden, whole.hidden[first * n_owned..], "{ty}");
        assert_eq!(part.y, whole.y[first * n_embd..], "{ty}");
    }
}
