//! Which layers are faster with their copies, measured by decoding.

use std::time::Instant;

use powerinfer_predictor::{CalibrationFile, UseReason};
use powerinfer_sparse_ops::{ActiveMode, FfnInput, LayerId, TokenId};

use super::cut::Sequence;
use super::{CalibrateError, CancelToken, Model, Phase, Progress};
use crate::forward::Watch;
use crate::session::{Session, SessionOptions};

/// Tokens that are decoded, and how often each. The fastest time counts: what else a machine does only adds.
const N_TOKENS: usize = 16;
const N_REPEATS: usize = 4;

/// Tokens that go before them.
const N_BEFORE: usize = 7;

/// Share of a layer's time that a copy must save to be used. What is left out is not quite nothing, and a measured
/// difference below this is noise.
const MIN_GAIN: f64 = 0.03;

/// Seconds of each layer in one step.
struct LayerTimes {
    last: Instant,
    seconds: Vec<f64>,
}

impl Watch for LayerTimes {
    fn ffn_input(&mut self, _: LayerId, _: &FfnInput) {}

    fn after_layer(&mut self, _: LayerId, _: &[f32]) {
        let now = Instant::now();
        self.seconds.push((now - self.last).as_secs_f64());
        self.last = now;
    }
}

/// Times the layers of a model in which every layer has its copy, and stores which use it.
pub(super) fn decide(
    model: &Model,
    sequences: &[Sequence],
    calibration: &mut CalibrationFile,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), CalibrateError> {
    let n_layer = model.spec().n_layer;
    let tokens: Vec<TokenId> = sequences.iter().flat_map(|s| &s.tokens[1..]).copied().collect();
    let n_before = N_BEFORE.min(tokens.len() - 1);
    let tokens = &tokens[..tokens.len().min(n_before + N_TOKENS).min(model.spec().n_ctx_train)];
    let (before, timed) = tokens.split_at(n_before.min(tokens.len() - 1));
    let modes = [ActiveMode::Exact, ActiveMode::Predictor];
    let mut sessions = Vec::with_capacity(modes.len());
    for mode in modes {
        let mut session = model.session(&SessionOptions { n_ctx: Some(tokens.len()), mode: Some(mode) })?;
        session.prefill(before)?;
        sessions.push(session);
    }
    let mut seconds = [vec![0.0; n_layer], vec![0.0; n_layer]];
    for (done, &token) in timed.iter().enumerate() {
        let mut fastest = [vec![f64::INFINITY; n_layer], vec![f64::INFINITY; n_layer]];
        for _ in 0..N_REPEATS {
            if cancel.is_cancelled() {
                return Err(CalibrateError::Cancelled);
            }
            // In turns, so that a busy moment of the machine hits both.
            for (session, fastest) in sessions.iter_mut().zip(&mut fastest) {
                let times = step(session, token)?;
                fastest.iter_mut().zip(times).for_each(|(fastest, time)| *fastest = fastest.min(time));
            }
        }
        for (session, (sum, fastest)) in sessions.iter_mut().zip(seconds.iter_mut().zip(&fastest)) {
            session.prefill(&[token])?;
            sum.iter_mut().zip(fastest).for_each(|(sum, time)| *sum += time);
        }
        progress(Progress { phase: Phase::Time, done: done + 1, total: timed.len() });
    }
    let [exact, predictor] = seconds;
    let us = 1e6 / timed.len() as f64;
    for ((layer, exact), predictor) in calibration.layers_mut().iter_mut().zip(exact).zip(predictor) {
        let used = predictor < exact * (1.0 - MIN_GAIN);
        let reason = if used { UseReason::Faster } else { UseReason::Slower };
        layer.decide(used, reason, exact * us, predictor * us);
    }
    Ok(())
}

/// One step with a token that is taken back.
fn step(session: &mut Session, token: TokenId) -> Result<Vec<f64>, CalibrateError> {
    let mut times = LayerTimes { last: Instant::now(), seconds: Vec::new() };
    session.watched(&[token], &mut times)?;
    session.rewind(session.tokens().len() - 1)?;
    Ok(times.seconds)
}
