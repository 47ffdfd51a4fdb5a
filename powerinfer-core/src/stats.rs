//! What generation cost: tokens, time, bytes, rows.

use std::time::Duration;

use powerinfer_sparse_ops::StepCost;

/// Totals of one kind of step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseStats {
    /// Tokens that went through the model.
    pub tokens: u64,
    /// Steps they took.
    pub steps: u64,
    /// Time spent in the forward pass.
    pub elapsed: Duration,
    /// What the backends read and computed.
    pub cost: StepCost,
}

impl PhaseStats {
    pub(crate) fn add(&mut self, tokens: usize, elapsed: Duration, cost: StepCost) {
        self.tokens += tokens as u64;
        self.steps += 1;
        self.elapsed += elapsed;
        self.cost += cost;
    }

    /// Tokens per second; 0 without any.
    pub fn tok_s(&self) -> f64 {
        ratio(self.tokens as f64, self.elapsed.as_secs_f64())
    }

    /// Bytes of weights and KV cache read per token.
    pub fn bytes_per_token(&self) -> f64 {
        ratio((self.cost.weight_bytes + self.cost.kv_bytes) as f64, self.tokens as f64)
    }

    /// Share of (neuron, token) pairs that really fired.
    pub fn fired_share(&self) -> f64 {
        ratio(self.cost.fired_neurons as f64, self.cost.owned_neurons as f64)
    }

    /// Share of (neuron, token) pairs that were looked at: all of them without a predictor.
    pub fn active_share(&self) -> f64 {
        ratio(self.cost.active_neurons as f64, self.cost.owned_neurons as f64)
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

/// Prefill and decode apart, since they are bound by different things.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SessionStats {
    /// Steps of several tokens, and single ones that belong to a prompt.
    pub prefill: PhaseStats,
    /// Steps of one generated token.
    pub decode: PhaseStats,
}
