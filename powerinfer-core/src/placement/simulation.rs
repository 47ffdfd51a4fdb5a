//! Speeds predicted for published models on published machines, beside the published figures.
//!
//! The model is the planner's own, [`plan`]; assumptions are listed in `docs/simulation.md`.

use std::fmt;

use powerinfer_sparse_ops::{ActiveMode, Gating};

use super::{Budget, Machine, ModelShape, PlanRequest, Rates, plan};

/// One model on one machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulated {
    /// The model and its type.
    pub model: String,
    /// The machine.
    pub machine: &'static str,
    /// Tokens a second with everything on the host, every row read.
    pub dense_host: f64,
    /// Tokens a second on the host alone with the predictor.
    pub sparse_host: f64,
    /// With placement, and the trained predictors of the original (about 8 % of the model's bytes).
    pub low_rank: f64,
    /// With placement, and 2-bit copies of the gates.
    pub gate_copy: f64,
    /// With placement, and no predictor: the gate of every neuron is read.
    pub exact: f64,
    /// As `low_rank`, with three exchanges a layer instead of one.
    pub three_exchanges: f64,
    /// What was published for the original, if it was.
    pub published: Option<f64>,
}

/// The table of [`simulation`].
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation(pub Vec<Simulated>);

struct Case {
    name: &'static str,
    machine: &'static str,
    n_layer: usize,
    n_embd: usize,
    kv_dim: usize,
    n_ff: usize,
    n_vocab: usize,
    gating: Gating,
    weight_bytes: f64,
    /// Share of the neurons active for a token, and share of them that makes 80 % of the activations.
    active: f64,
    hot: f64,
    published: Option<f64>,
}

const F16: f64 = 2.0;
const Q4: f64 = 0.5625;

const CASES: [Case; 5] = [
    Case {
        name: "Falcon-40B F16",
        machine: "rtx4090+ddr5",
        n_layer: 60,
        n_embd: 8192,
        kv_dim: 512,
        n_ff: 32768,
        n_vocab: 65024,
        gating: Gating::None,
        weight_bytes: F16,
        active: 0.05,
        hot: 0.17,
        published: Some(13.0),
    },
    Case {
        name: "Falcon-40B Q4",
        machine: "rtx4090+ddr5",
        n_layer: 60,
        n_embd: 8192,
        kv_dim: 512,
        n_ff: 32768,
        n_vocab: 65024,
        gating: Gating::None,
        weight_bytes: Q4,
        active: 0.05,
        hot: 0.17,
        published: Some(29.08),
    },
    Case {
        name: "ReluLLaMA-70B Q4",
        machine: "rtx4090+ddr5",
        n_layer: 80,
        n_embd: 8192,
        kv_dim: 1024,
        n_ff: 28672,
        n_vocab: 32000,
        gating: Gating::Gate,
        weight_bytes: Q4,
        active: 0.18,
        hot: 0.26,
        published: Some(10.0),
    },
    Case {
        name: "ProSparse-13B F16",
        machine: "rtx2080ti+ddr4",
        n_layer: 40,
        n_embd: 5120,
        kv_dim: 5120,
        n_ff: 13824,
        n_vocab: 32000,
        gating: Gating::Gate,
        weight_bytes: F16,
        active: 0.112,
        hot: 0.26,
        published: None,
    },
    Case {
        name: "Bamboo-7B F16",
        machine: "rtx2080ti+ddr4",
        n_layer: 32,
        n_embd: 4096,
        kv_dim: 1024,
        n_ff: 14336,
        n_vocab: 32000,
        gating: Gating::GateAndUp,
        weight_bytes: F16,
        active: 0.10,
        hot: 0.26,
        published: Some(26.0),
    },
];

/// Predicts all cases.
pub fn simulation() -> Simulation {
    Simulation(CASES.iter().map(simulate).collect())
}

fn simulate(case: &Case) -> Simulated {
    let shape = |predictor_bytes: f64| {
        ModelShape::uniform(
            case.name,
            case.n_layer,
            case.n_embd,
            case.kv_dim,
            case.n_ff,
            case.n_vocab,
            case.gating,
            case.weight_bytes,
            predictor_bytes as u64,
        )
    };
    let ffn_weights = (case.n_embd * case.n_ff * if case.gating == Gating::None { 2 } else { 3 }) as f64;
    // Table 6 of the paper: predictors of about 8 % of the parameters, mostly beside the FFN.
    let low_rank = shape(0.1 * ffn_weights * case.weight_bytes);
    let gate_copy = shape((case.n_embd * case.n_ff) as f64 / 4.0);
    let none = shape(0.0);
    let mut machine =
        Machine::named(case.machine, case.weight_bytes).expect("the parts of the cases are in the file");
    machine.devices[0].budget = Budget::Auto;
    let rates = Rates::skewed(&none, case.active, case.hot);
    let run = |shape: &ModelShape, mode, devices: &[super::Accelerator]| {
        let request = PlanRequest {
            shape,
            rates: &rates,
            mode,
            host: &machine.host,
            devices,
            n_ctx: 2048,
            n_batch: 512,
            n_seq: 1,
        };
        1.0 / plan(&request).token_seconds
    };
    let mut three = machine.devices.clone();
    three[0].latency *= 3.0;
    three[0].link /= (2 * case.n_ff + case.n_embd) as f64 / case.n_embd as f64;
    Simulated {
        model: case.name.to_owned(),
        machine: case.machine,
        dense_host: run(&none, ActiveMode::Dense, &[]),
        sparse_host: run(&low_rank, ActiveMode::Predictor, &[]),
        low_rank: run(&low_rank, ActiveMode::Predictor, &machine.devices),
        gate_copy: run(&gate_copy, ActiveMode::Predictor, &machine.devices),
        exact: run(&none, ActiveMode::Exact, &machine.devices),
        three_exchanges: run(&low_rank, ActiveMode::Predictor, &three),
        published: case.published,
    }
}

impl fmt::Display for Simulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Predicted tokens/s: a model of bytes and bandwidths, no measurement.")?;
        writeln!(
            f,
            "{:<18} {:<15} {:>7} {:>7} {:>9} {:>7} {:>7} {:>7} {:>9}",
            "model", "machine", "dense", "sparse", "placed:", "2-bit", "exact", "three", "published"
        )?;
        writeln!(
            f,
            "{:<18} {:<15} {:>7} {:>7} {:>9} {:>7} {:>7} {:>7} {:>9}",
            "", "", "on host", "on host", "trained", "copy", "", "exch.", "original"
        )?;
        for s in &self.0 {
            let published = s.published.map_or_else(|| "-".to_owned(), |p| format!("{p:.1}"));
            writeln!(
                f,
                "{:<18} {:<15} {:>7.1} {:>7.1} {:>9.1} {:>7.1} {:>7.1} {:>7.1} {published:>9}",
                s.model,
                s.machine,
                s.dense_host,
                s.sparse_host,
                s.low_rank,
                s.gate_copy,
                s.exact,
                s.three_exchanges
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_beats_the_host_and_one_exchange_beats_three() {
        for s in simulation().0 {
            assert!(s.low_rank > s.sparse_host && s.sparse_host > s.dense_host, "{s:?}");
            assert!(s.gate_copy > s.sparse_host && s.exact > s.dense_host, "{s:?}");
            assert!(s.low_rank >= s.three_exchanges, "{s:?}");
        }
    }
}
