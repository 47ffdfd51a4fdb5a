//! A bare engine loop for tests of backends: the calls of a step in the order that the trait prescribes.

use powerinfer_sparse_ops::{
    ActiveMode, BlockKind, FfnInput, HybridBackend, ModelSpec, SeqId, Step, StepRow, TokenId,
};

/// Backends and the buffers of their steps; the first one is home.
pub struct Drive<'b> {
    spec: &'b ModelSpec,
    backends: Vec<&'b mut dyn HybridBackend>,
    input: FfnInput,
    sum: Vec<f32>,
    logits: Vec<f32>,
    max_rows: usize,
}

impl std::fmt::Debug for Drive<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Drive").field("backends", &self.backends.len()).finish_non_exhaustive()
    }
}

impl<'b> Drive<'b> {
    /// A loop over these backends for steps of up to `max_rows` tokens; makes sequence 0 of 64 positions.
    pub fn new(spec: &'b ModelSpec, mut backends: Vec<&'b mut dyn HybridBackend>, max_rows: usize) -> Self {
        for backend in &mut backends {
            backend.reserve(SeqId(0), 64, max_rows).expect("64 positions fit everywhere");
        }
        Self {
            input: FfnInput::with_capacity(max_rows, spec.n_embd, spec.max_n_ff()),
            sum: vec![0.0; max_rows * spec.n_embd],
            logits: vec![0.0; max_rows * spec.n_vocab],
            spec,
            backends,
            max_rows,
        }
    }

    /// The backends.
    pub fn backends(&mut self) -> &mut [&'b mut dyn HybridBackend] {
        &mut self.backends
    }

    /// Runs tokens of sequence 0 from position `first` on as one step; the logits of all of them.
    pub fn step(&mut self, first: u32, tokens: &[u32], mode: ActiveMode) -> &[f32] {
        let mut rows = [StepRow { seq: SeqId(0), pos: 0, token: TokenId(0) }; 64];
        for ((row, &token), pos) in rows.iter_mut().zip(tokens).zip(first..) {
            *row = StepRow { seq: SeqId(0), pos, token: TokenId(token) };
        }
        self.rows(&rows[..tokens.len()], mode)
    }

    /// Runs any rows as one step; the logits of all of them. Allocates nothing itself.
    pub fn rows(&mut self, rows: &[StepRow], mode: ActiveMode) -> &[f32] {
        assert!(rows.len() <= self.max_rows && self.backends.len() <= 4);
        let step = Step { rows, mode };
        let sum = &mut self.sum[..rows.len() * self.spec.n_embd];
        self.backends[0].embed(&step);
        for layer in self.spec.layers() {
            if self.spec.block == BlockKind::Parallel {
                self.backends[0].ffn_input(layer, &step, &mut self.input);
                self.backends[0].attend(layer, &step);
            } else {
                self.backends[0].attend(layer, &step);
                self.backends[0].ffn_input(layer, &step, &mut self.input);
            }
            sum.fill(0.0);
            let mut tickets = [None, None, None, None];
            for (ticket, backend) in tickets.iter_mut().zip(&mut self.backends) {
                *ticket = Some(backend.ffn_start(layer, &self.input));
            }
            for (ticket, backend) in tickets.iter_mut().zip(&mut self.backends) {
                backend.ffn_finish(ticket.take().expect("each backend was started"), sum);
            }
            self.backends[0].ffn_add(layer, sum);
        }
        let logits = &mut self.logits[..rows.len() * self.spec.n_vocab];
        self.backends[0].head(0..rows.len(), logits);
        logits
    }
}
