//! Who holds what.

use powerinfer_sparse_ops::{LayerId, ModelSpec, NeuronSet};

/// Which backend holds which part of a model. Backends are named by their place in the engine's list; 0 is the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// Holds the token tables.
    pub embed: usize,
    /// Holds the last norm and the output matrix.
    pub head: usize,
    /// One for each layer.
    pub layers: Vec<LayerAssignment>,
}

/// Who holds what of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerAssignment {
    /// Holds attention, norms and predictor, and keeps the keys and values.
    pub home: usize,
    /// The neurons that each backend holds; every neuron is in one of them.
    pub owned: Vec<NeuronSet>,
}

/// An assignment that does not fit the model or the backends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AssignmentError {
    /// Another number of layers.
    #[error("the assignment has {got} layers, the model {expected}")]
    Layers {
        /// Layers of the model.
        expected: usize,
        /// Layers of the assignment.
        got: usize,
    },
    /// A backend that is not there.
    #[error("{part} is assigned to backend {backend}, there are {n_backends}")]
    Backend {
        /// What is assigned.
        part: String,
        /// To whom.
        backend: usize,
        /// How many there are.
        n_backends: usize,
    },
    /// Not one set of neurons for each backend.
    #[error("layer {layer} has {got} sets of neurons, there are {n_backends} backends")]
    Sets {
        /// The layer.
        layer: LayerId,
        /// Sets of the layer.
        got: usize,
        /// How many backends there are.
        n_backends: usize,
    },
    /// A set made for a layer of another size.
    #[error("layer {layer}: the set of backend {backend} is one of {got} neurons, the layer has {expected}")]
    Width {
        /// The layer.
        layer: LayerId,
        /// Whose set.
        backend: usize,
        /// Neurons of the layer.
        expected: usize,
        /// Neurons that the set is made for.
        got: usize,
    },
    /// A neuron that nobody holds, or that two hold.
    #[error("layer {layer}: {n_owners} backends hold neuron {neuron}, one must")]
    Owners {
        /// The layer.
        layer: LayerId,
        /// The first such neuron.
        neuron: usize,
        /// How many hold it.
        n_owners: usize,
    },
}

impl Assignment {
    /// Everything on backend `backend` of `n_backends`.
    ///
    /// # Panics
    /// If there is no such backend.
    pub fn all_on(spec: &ModelSpec, backend: usize, n_backends: usize) -> Self {
        assert!(backend < n_backends, "backend {backend} of {n_backends}");
        let owned = |n_ff: usize| {
            (0..n_backends)
                .map(|b| if b == backend { NeuronSet::all(n_ff) } else { NeuronSet::none(n_ff) })
                .collect()
        };
        let layers = spec.n_ff.iter().map(|&n_ff| LayerAssignment { home: backend, owned: owned(n_ff) });
        Self { embed: backend, head: backend, layers: layers.collect() }
    }

    /// Checks that every part has one holder among `n_backends`.
    ///
    /// # Errors
    /// [`AssignmentError`] naming the first part that has not.
    pub fn check(&self, spec: &ModelSpec, n_backends: usize) -> Result<(), AssignmentError> {
        if self.layers.len() != spec.n_layer {
            return Err(AssignmentError::Layers { expected: spec.n_layer, got: self.layers.len() });
        }
        let homes =
            self.layers.iter().zip(spec.layers()).map(|(l, layer)| (format!("layer {layer}"), l.home));
        let ends = [("the embedding".to_owned(), self.embed), ("the head".to_owned(), self.head)];
        if let Some((part, backend)) = ends.into_iter().chain(homes).find(|(_, b)| *b >= n_backends) {
            return Err(AssignmentError::Backend { part, backend, n_backends });
        }
        for ((layer, assigned), &n_ff) in spec.layers().zip(&self.layers).zip(&spec.n_ff) {
            assigned.check(layer, n_ff, n_backends)?;
        }
        Ok(())
    }
}

impl LayerAssignment {
    fn check(&self, layer: LayerId, n_ff: usize, n_backends: usize) -> Result<(), AssignmentError> {
        if self.owned.len() != n_backends {
            return Err(AssignmentError::Sets { layer, got: self.owned.len(), n_backends });
        }
        if let Some((backend, set)) = self.owned.iter().enumerate().find(|(_, set)| set.n_ff() != n_ff) {
            return Err(AssignmentError::Width { layer, backend, expected: n_ff, got: set.n_ff() });
        }
        let mut n_owners = vec![0; n_ff];
        for set in &self.owned {
            set.ids().iter().for_each(|id| n_owners[id.index()] += 1);
        }
        match n_owners.iter().position(|&n| n != 1) {
            None => Ok(()),
            Some(neuron) => Err(AssignmentError::Owners { layer, neuron, n_owners: n_owners[neuron] }),
        }
    }
}
