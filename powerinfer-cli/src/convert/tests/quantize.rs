use super::super::quantize::{QuantizeReport, QuantizeRequest, quantize};
use super::*;

fn request(setup: &Setup, input: &str, matrix_type: WeightType) -> QuantizeRequest {
    QuantizeRequest { model: setup.path(input), output: setup.path("out.gguf"), matrix_type, replace: true }
}

fn quantized(request: &QuantizeRequest) -> (QuantizeReport, GgufFile) {
    let report = quantize(request, &mut |_, _, _| {}).unwrap();
    (report, GgufFile::read(&request.output).unwrap())
}

#[test]
fn every_matrix_gets_the_type_and_its_cost_is_that_of_the_codec() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let dense = GgufFile::read(setup.path("dense.gguf")).unwrap();
    for (ty, id) in
        [(WeightType::F16, 1), (WeightType::BF16, 32), (WeightType::Q8_0, 7), (WeightType::Q4_0, 2)]
    {
        let (report, file) = quantized(&request(&setup, "dense.gguf", ty));
        assert_eq!(file.n_tensors(), dense.n_tensors());
        assert_eq!((report.n_tensors, report.output_bytes), (file.n_tensors(), file.bytes().len() as u64));
        assert_eq!(report.notes, Vec::<String>::new());
        let mut errors = std::collections::BTreeMap::<String, RoundingError>::new();
        for tensor in dense.tensors() {
            let name = tensor.name();
            let copy = file.tensor(name).unwrap();
            assert_eq!(copy.dims(), tensor.dims());
            if name.contains("norm") {
                assert_eq!((copy.ty(), copy.as_slice()), (GgmlType::F32, tensor.as_slice()));
                continue;
            }
            let before = tensor.decode().unwrap();
            assert_eq!((copy.ty(), copy.as_slice()), (ty.into(), &encoded(ty, tensor.n_cols(), &before)[..]));
            let kind = name.split('.').rev().nth(1).unwrap();
            errors.entry(kind.to_owned()).or_default().add(&before, &copy.decode().unwrap());
        }
        assert_eq!(report.kinds.len(), errors.len());
        for kind in &report.kinds {
            assert_eq!((kind.from, kind.to), (GgmlType::F32, ty.into()));
            assert_eq!(kind.count, if kind.name == "token_embd" { 1 } else { N_LAYER as usize });
            let (got, expected) = (kind.error.relative_rms(), errors[&kind.name].relative_rms());
            assert!((got - expected).abs() < 1e-12, "{}: {got} {expected}", kind.name);
        }
        let keys = file.metadata();
        assert_eq!(keys.require::<u32>(FILE_TYPE_KEY).unwrap(), id);
        let in_blocks = matches!(ty, WeightType::Q8_0 | WeightType::Q4_0);
        assert_eq!(keys.find::<u32>("general.quantization_version").unwrap(), in_blocks.then_some(2));
        for (key, value) in dense.metadata().iter().filter(|(key, _)| *key != FILE_TYPE_KEY) {
            assert_eq!(keys.get(key), Some(value), "{key}");
        }
        logits(&setup.path("out.gguf"), ActiveMode::Dense);
    }
}

#[test]
fn sparse_files_stay_sparse_and_ranks_that_do_not_fit_are_noted() {
    let setup = Setup::new(WeightType::F16);
    setup.write();
    setup.convert(&setup.request()).unwrap();
    let (report, file) = quantized(&request(&setup, "sparse.gguf", WeightType::Q8_0));
    assert_eq!(file.magic(), Magic::Pwri);
    assert_eq!(report.notes, ["fc2 stays F16: a row of 3 is no multiple of 32"]);
    let ty = |name: &str| file.tensor(name).unwrap().ty();
    assert_eq!((ty("blk.3.fc1.weight"), ty("blk.3.fc2.weight")), (GgmlType::Q8_0, GgmlType::F16));
    assert_eq!(ty("blk.3.ffn_down_t.weight"), GgmlType::Q8_0);
    let fc2 = report.kinds.iter().find(|kind| kind.name == "fc2").unwrap();
    assert_eq!((fc2.from, fc2.to, fc2.error.relative_rms()), (GgmlType::F16, GgmlType::F16, 0.0));
    logits(&setup.path("out.gguf"), ActiveMode::Predictor);
    let before = fs::read(setup.path("out.gguf")).unwrap();
    let again =
        QuantizeRequest { output: setup.path("again.gguf"), ..request(&setup, "out.gguf", WeightType::Q8_0) };
    assert!(quantized(&again).0.kinds.iter().all(|kind| kind.error.relative_rms() == 0.0));
    assert!(fs::read(setup.path("again.gguf")).unwrap() == before, "nothing is left to do");
}

#[test]
fn what_cannot_be_quantised_is_refused_and_nothing_is_written() {
    let setup = Setup::new(WeightType::F32);
    setup.write();
    let error_of = |request: &QuantizeRequest| quantize(request, &mut |_, _, _| {}).unwrap_err();
    let error = error_of(&request(&setup, "dense.gguf", WeightType::Q6_K));
    assert!(matches!(error, ConvertError::NoEncoder { ty: WeightType::Q6_K, .. }), "{error}");
    let error = error_of(&request(&setup, "none.gguf", WeightType::Q8_0));
    assert!(matches!(error, ConvertError::Model { .. }), "{error}");
    assert!(!setup.path("out.gguf").exists());
    let same = QuantizeRequest {
        output: setup.path("dense.gguf"),
        ..request(&setup, "dense.gguf", WeightType::Q8_0)
    };
    assert!(matches!(error_of(&same), ConvertError::SameFile { .. }));
    fs::write(setup.path("out.gguf"), "precious").unwrap();
    let kept = QuantizeRequest { replace: false, ..request(&setup, "dense.gguf", WeightType::Q8_0) };
    assert!(matches!(error_of(&kept), ConvertError::Exists { .. }));
    assert_eq!(fs::read(setup.path("out.gguf")).unwrap(), b"precious");
}
