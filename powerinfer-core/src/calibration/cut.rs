//! Which parts of the texts are used, and for what.

use super::{CalibrateError, Fold, ModelSpec, RecordOptions, TokenId};

/// Fewer tokens make no sequence.
const MIN_LEN: usize = 8;

/// Fewer sequences cannot be divided into a part to fit on and two to judge on.
const MIN_SEQUENCES: usize = 4;

/// Tokens that go through the model from position 0 on.
pub(super) struct Sequence {
    pub(super) tokens: Vec<TokenId>,
    /// Which text it is from.
    text: usize,
}

/// Sequences of equal length, as many from each text as there are, spread over the whole of each.
pub(super) fn sequences(
    texts: &[Vec<TokenId>],
    spec: &ModelSpec,
    options: &RecordOptions,
) -> Result<Vec<Sequence>, CalibrateError> {
    let n_tokens: usize = texts.iter().map(Vec::len).sum();
    let budget = n_tokens.min(options.n_tokens.max(MIN_SEQUENCES * MIN_LEN));
    let len = options.sequence_len.max(MIN_LEN).min(spec.n_ctx_train).min(budget / MIN_SEQUENCES);
    if len < MIN_LEN {
        return Err(CalibrateError::TextTooShort { n_tokens, needed: MIN_SEQUENCES * MIN_LEN });
    }
    let mut counts = vec![0; texts.len()];
    for _ in 0..budget / len {
        // The text of which the fewest are taken, among those that have more.
        let more = (0..texts.len()).filter(|&text| (counts[text] + 1) * len <= texts[text].len());
        let Some(text) = more.min_by_key(|&text| counts[text]) else { break };
        counts[text] += 1;
    }
    if counts.iter().sum::<usize>() < MIN_SEQUENCES {
        return Err(CalibrateError::TextTooShort { n_tokens, needed: MIN_SEQUENCES * MIN_LEN });
    }
    let mut sequences = Vec::new();
    for (text, (tokens, &count)) in texts.iter().zip(&counts).enumerate() {
        for place in 0..count {
            let first = tokens.len() / count * place;
            let mut tokens = tokens[first..first + len].to_vec();
            if let (Some(bos), Some(first)) = (options.bos, tokens.first_mut()) {
                *first = bos;
            }
            sequences.push(Sequence { tokens, text });
        }
    }
    Ok(sequences)
}

/// For each recorded token (all but the first of each sequence), what it is for. Every other sequence of a text is
/// fitted on, the others are held out, in turns for one part and the other; the two kinds differ by one at most.
pub(super) fn folds(sequences: &[Sequence]) -> Vec<Fold> {
    let (mut n_fit, mut n_held) = (0, 0);
    let mut folds = Vec::new();
    for of_text in sequences.chunk_by(|a, b| a.text == b.text) {
        let mut fit = n_fit <= n_held;
        for sequence in of_text {
            let fold = if fit { Fold::Fit } else { Fold::Held(n_held % 2) };
            n_fit += usize::from(fit);
            n_held += usize::from(!fit);
            folds.resize(folds.len() + sequence.tokens.len() - 1, fold);
            fit = !fit;
        }
    }
    folds
}

#[cfg(test)]
mod tests {
    use powerinfer_testing::tiny::{TinyModel, TinyOptions};

    use super::*;

    fn cut(lens: &[usize], options: &RecordOptions) -> Result<Vec<Sequence>, CalibrateError> {
        let texts: Vec<Vec<TokenId>> = lens.iter().map(|&n| (0..n as u32).map(TokenId).collect()).collect();
        sequences(&texts, &TinyModel::new(TinyOptions::default()).spec, options)
    }

    #[test]
    fn texts_are_used_alike_and_to_their_end() {
        let options = RecordOptions { n_tokens: 128, sequence_len: 16, ..RecordOptions::default() };
        let cut = cut(&[1000, 40, 1000], &options).unwrap();
        let count = |text| cut.iter().filter(|s| s.text == text).count();
        assert_eq!([count(0), count(1), count(2)], [3, 2, 3]);
        assert!(cut.iter().all(|s| s.tokens.len() == 16));
        assert_eq!(cut.iter().rfind(|s| s.text == 0).unwrap().tokens[0], TokenId(666));
        let folds = folds(&cut);
        assert_eq!(folds.len(), 8 * 15);
        for fold in [Fold::Fit, Fold::Held(0), Fold::Held(1)] {
            assert!(folds.contains(&fold), "{fold:?}");
        }
    }

    #[test]
    fn every_part_has_tokens_however_few_sequences_there_are() {
        for lens in [&[64][..], &[32, 32], &[48, 16], &[16, 48], &[16, 16, 32], &[16, 32, 16], &[16; 4]] {
            let options = RecordOptions { n_tokens: 64, sequence_len: 16, ..RecordOptions::default() };
            let folds = folds(&cut(lens, &options).unwrap());
            for fold in [Fold::Fit, Fold::Held(0), Fold::Held(1)] {
                assert!(folds.contains(&fold), "{lens:?}: {fold:?}");
            }
        }
    }

    #[test]
    fn short_texts_make_short_sequences_and_shorter_ones_none() {
        let cut_len = |n| cut(&[n], &RecordOptions::default()).map(|cut| cut[0].tokens.len());
        assert_eq!(cut_len(100).unwrap(), 25);
        assert_eq!(cut_len(32).unwrap(), 8);
        assert!(matches!(cut_len(31), Err(CalibrateError::TextTooShort { n_tokens: 31, needed: 32 })));
        let err = cut(&[], &RecordOptions::default()).err().unwrap();
        assert!(matches!(err, CalibrateError::TextTooShort { n_tokens: 0, .. }));
    }
}
