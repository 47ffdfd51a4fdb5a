//! Copies a model with its matrices in another type.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

use powerinfer_gguf::{GgmlType, GgufModel, GgufWriter, Metadata, Tensor, TensorSource, Value};
use powerinfer_sparse_ops::WeightType;

use super::{
    Content, ConvertError, FILE_TYPE_KEY, Item, Progress, RoundingError, check_output, file_type, finish,
    has_encoder, is_split_key,
};

/// Says how blocks are to be read; 2 is the version with F16 scales, which all files of today have.
const QUANTIZATION_VERSION_KEY: &str = "general.quantization_version";

/// What to copy and how.
#[derive(Clone, Debug)]
pub(crate) struct QuantizeRequest {
    /// GGUF or PWRI file; the first one, if there are several.
    pub(crate) model: PathBuf,
    /// The file to write.
    pub(crate) output: PathBuf,
    /// Type for every matrix.
    pub(crate) matrix_type: WeightType,
    /// Whether an output that is there already is replaced.
    pub(crate) replace: bool,
}

/// What became of the matrices that do the same work in each layer.
#[derive(Clone, Debug)]
pub(crate) struct MatrixKind {
    /// The tensor's name without layer and suffix, as in `ffn_up`.
    pub(crate) name: String,
    /// How many there are.
    pub(crate) count: usize,
    /// Type before.
    pub(crate) from: GgmlType,
    /// Type in the file.
    pub(crate) to: GgmlType,
    /// What the rounding of all of them cost.
    pub(crate) error: RoundingError,
}

/// What was written and what it cost.
#[derive(Clone, Debug)]
pub(crate) struct QuantizeReport {
    /// Bytes of the file.
    pub(crate) output_bytes: u64,
    /// Tensors in the file.
    pub(crate) n_tensors: usize,
    /// By name.
    pub(crate) kinds: Vec<MatrixKind>,
    /// Matrices that could not have the type.
    pub(crate) notes: Vec<String>,
}

/// Writes the model of `request` with every matrix in the type asked for. Tensors go through memory one at a time;
/// the file appears when it is complete.
///
/// Keys are copied; `general.file_type` is set. Tensors of one axis, and matrices whose rows are no whole number of
/// blocks, are copied as they are.
///
/// # Errors
/// A [`ConvertError`] that names what does not fit.
pub(crate) fn quantize(
    request: &QuantizeRequest,
    progress: &mut Progress<'_>,
) -> Result<QuantizeReport, ConvertError> {
    let QuantizeRequest { model: path, output, matrix_type: ty, replace } = request;
    if !has_encoder(*ty) {
        return Err(ConvertError::NoEncoder { what: "matrices", ty: *ty });
    }
    check_output(output, [path].into_iter(), *replace)?;
    let model = GgufModel::open(path)
        .map_err(|source| ConvertError::Model { path: path.clone(), source: Box::new(source) })?;
    let mut items = Vec::new();
    let mut kinds = BTreeMap::new();
    let mut notes = BTreeSet::new();
    for tensor in model.tensors() {
        let is_matrix = tensor.dims().len() > 1;
        let item = if is_matrix { encoded(tensor, *ty, &mut notes) } else { copied(tensor) };
        let (name, from, to) = (kind_name(tensor.name()), tensor.ty(), item.ty);
        let key = is_matrix.then(|| (name.clone(), from.name(), to.name()));
        if let Some(key) = key.clone() {
            let new = || MatrixKind { name, count: 0, from, to, error: RoundingError::default() };
            kinds.entry(key).or_insert_with(new).count += 1;
        }
        items.push((item, key));
    }

    let n_tensors = items.len();
    let total = items.iter().map(|(item, _)| item.n_bytes()).sum();
    let state = RefCell::new((kinds, 0, progress));
    let mut writer = GgufWriter::new(model.magic());
    copy_keys(&mut writer, model.metadata(), *ty)?;
    for (item, kind) in items {
        let (name, dims, ty) = (item.name.clone(), item.dims.clone(), item.ty);
        let state = &state;
        let write = move |out: &mut dyn Write| {
            let error = item.write(out)?;
            let (kinds, done, progress) = &mut *state.borrow_mut();
            if let Some(kind) = kind.and_then(|key| kinds.get_mut(&key)) {
                kind.error.merge(error);
            }
            *done += item.n_bytes();
            progress(&item.name, *done, total);
            Ok(())
        };
        writer.tensor(&name, &dims, ty, TensorSource::stream(write))?;
    }
    let output_bytes = finish(writer, output)?;
    let (kinds, ..) = state.into_inner();
    Ok(QuantizeReport {
        output_bytes,
        n_tensors,
        kinds: kinds.into_values().collect(),
        notes: notes.into_iter().collect(),
    })
}

fn copied(tensor: Tensor<'_>) -> Item<'_> {
    let (name, dims) = (tensor.name().to_owned(), tensor.dims().to_vec());
    Item { name, dims, ty: tensor.ty(), content: Content::Copy(tensor) }
}

/// The tensor in the type, or as it is with a note that says why.
fn encoded<'m>(tensor: Tensor<'m>, ty: WeightType, notes: &mut BTreeSet<String>) -> Item<'m> {
    let (from, n_cols) = (tensor.ty(), tensor.n_cols());
    let item = copied(tensor);
    if from == GgmlType::from(ty) {
        return item;
    }
    let mut stays = |why: String| notes.insert(format!("{} stays {from}: {why}", kind_name(&item.name)));
    if from.weight_type().is_none() {
        stays("this type cannot be decoded".to_owned());
        return item;
    }
    if ty.row_bytes(n_cols).is_none() {
        stays(format!("a row of {n_cols} is no multiple of {}", ty.block_len()));
        return item;
    }
    Item { ty: ty.into(), content: Content::Encode(tensor, ty), ..item }
}

/// `blk.7.ffn_up.weight` is an `ffn_up`.
fn kind_name(tensor: &str) -> String {
    let name = tensor.strip_suffix(".weight").unwrap_or(tensor);
    let in_layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    in_layer.map_or(name, |(_, name)| name).to_owned()
}

fn copy_keys(
    writer: &mut GgufWriter<'_>,
    metadata: Metadata<'_>,
    ty: WeightType,
) -> Result<(), ConvertError> {
    let id = file_type(ty).map(Value::from);
    for (key, value) in metadata.iter().filter(|(key, _)| !is_split_key(key)) {
        let value = match &id {
            Some(id) if key == FILE_TYPE_KEY => id.clone(),
            _ => value.to_value(),
        };
        writer.key(key, value)?;
    }
    if let Some(id) = id.filter(|_| metadata.get(FILE_TYPE_KEY).is_none()) {
        writer.key(FILE_TYPE_KEY, id)?;
    }
    if ty.block_len() > 1 && metadata.get(QUANTIZATION_VERSION_KEY).is_none() {
        writer.key(QUANTIZATION_VERSION_KEY, 2u32)?;
    }
    Ok(())
}
