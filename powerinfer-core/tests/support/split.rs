//! What the tests of splits share: assignments at random, and runs that are compared.

use powerinfer_core::placement::{Assignment, LayerAssignment};
use powerinfer_core::{ActiveMode, Model, SessionOptions, TokenId};
use powerinfer_sparse_ops::{NeuronId, NeuronSet};
use powerinfer_testing::tiny::Random;

use super::{N_FF, N_LAYER};

/// Dense parts and neurons anywhere: each layer all on one backend, on none of some, or dealt out one by one.
pub(crate) fn random_assignment(random: &mut Random, n_backends: usize) -> Assignment {
    let layers = (0..N_LAYER).map(|_| {
        let kind = random.below(4);
        let (one, other) = (random.below(n_backends), random.below(n_backends));
        let owner: Vec<usize> = (0..N_FF)
            .map(|_| match kind {
                0 => one,
                1 if random.below(8) > 0 => one,
                1 => other,
                _ => random.below(n_backends),
            })
            .collect();
        let set = |b: usize| {
            let ids = (0..N_FF as u32).filter(|&i| owner[i as usize] == b).map(NeuronId);
            NeuronSet::from_ids(N_FF, ids)
        };
        LayerAssignment {
            home: if random.below(3) == 0 { 0 } else { random.below(n_backends) },
            owned: (0..n_backends).map(set).collect(),
        }
    });
    let layers = layers.collect();
    Assignment { embed: random.below(n_backends), head: random.below(n_backends), layers }
}

fn greedy(logits: &[f32]) -> TokenId {
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)));
    TokenId(best.expect("a vocabulary is not empty") as u32)
}

/// What a model says to a prompt.
pub(crate) struct Run {
    /// Logits of the prompt's last token and of each token that follows it greedily.
    pub(crate) logits: Vec<f32>,
    /// The tokens that follow.
    pub(crate) text: Vec<TokenId>,
    /// Bytes of neurons that were moved meanwhile.
    pub(crate) swapped_bytes: u64,
}

/// Reads a prompt and goes on greedily for `n_text` tokens.
pub(crate) fn run(model: &Model, mode: ActiveMode, prompt: &[TokenId], n_text: usize) -> Run {
    let options = SessionOptions { mode: Some(mode), ..SessionOptions::default() };
    let mut session = model.session(&options).unwrap();
    let mut logits = session.prefill(prompt).unwrap().to_vec();
    let mut text = vec![greedy(&logits)];
    for _ in 1..n_text {
        let last = session.decode(text[text.len() - 1]).unwrap();
        logits.extend_from_slice(last);
        text.push(greedy(last));
    }
    Run { logits, text, swapped_bytes: session.stats().decode.cost.swapped_bytes }
}
