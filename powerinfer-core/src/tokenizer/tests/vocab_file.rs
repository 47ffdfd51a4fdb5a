//! Reads the vocabulary of a model file for tests, trusting the file.

use crate::tokenizer::VocabSource;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

/// Metadata sits in front of the tensors; no test file has more than this.
const HEAD_BYTES: u64 = 16 << 20;

#[derive(Debug)]
enum Value {
    Int(i64),
    Float(f64),
    Text(Vec<u8>),
    List(Vec<Self>),
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (head, rest) = self.0.split_first_chunk::<N>().expect("the metadata fits in the part read");
        self.0 = rest;
        *head
    }

    fn len(&mut self) -> usize {
        u64::from_le_bytes(self.take()) as usize
    }

    fn text(&mut self) -> Vec<u8> {
        let len = self.len();
        let (head, rest) = self.0.split_at(len);
        self.0 = rest;
        head.to_vec()
    }

    fn value(&mut self, ty: u32) -> Value {
        match ty {
            0 | 7 => Value::Int(i64::from(self.take::<1>()[0])),
            1 => Value::Int(i64::from(i8::from_le_bytes(self.take()))),
            2 => Value::Int(i64::from(u16::from_le_bytes(self.take()))),
            3 => Value::Int(i64::from(i16::from_le_bytes(self.take()))),
            4 => Value::Int(i64::from(u32::from_le_bytes(self.take()))),
            5 => Value::Int(i64::from(i32::from_le_bytes(self.take()))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.take()))),
            8 => Value::Text(self.text()),
            9 => {
                let ty = u32::from_le_bytes(self.take());
                let n = self.len();
                Value::List((0..n).map(|_| self.value(ty)).collect())
            }
            10 | 11 => Value::Int(i64::from_le_bytes(self.take())),
            12 => Value::Float(f64::from_le_bytes(self.take())),
            other => panic!("metadata type {other}"),
        }
    }
}

/// The vocabulary and the chat template of a file, if it has one.
pub(crate) fn read(path: &Path) -> (VocabSource, Option<String>) {
    let mut head = Vec::new();
    let file = std::fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    file.take(HEAD_BYTES).read_to_end(&mut head).expect("the file can be read");
    let mut cursor = Cursor(&head);
    let _magic_and_version: [u8; 8] = cursor.take();
    let _n_tensors = cursor.len();
    let n_keys = cursor.len();
    let mut keys = HashMap::new();
    for _ in 0..n_keys {
        let key = String::from_utf8(cursor.text()).expect("keys are UTF-8");
        let ty = u32::from_le_bytes(cursor.take());
        keys.insert(key, cursor.value(ty));
    }
    let text = |key: &str| match keys.get(&format!("tokenizer.{key}")) {
        Some(Value::Text(text)) => Some(String::from_utf8(text.clone()).expect("UTF-8")),
        _ => None,
    };
    let int = |key: &str| match keys.get(&format!("tokenizer.ggml.{key}")) {
        Some(Value::Int(int)) => Some(*int),
        _ => None,
    };
    let list = |key: &str| match keys.get(&format!("tokenizer.ggml.{key}")) {
        Some(Value::List(list)) => Some(list.as_slice()),
        _ => None,
    };
    let texts = |list: &[Value]| -> Vec<Vec<u8>> {
        list.iter().filter_map(|v| if let Value::Text(t) = v { Some(t.clone()) } else { None }).collect()
    };
    let id = |key: &str| int(key).map(|id| u32::try_from(id).expect("ids are not negative"));
    let float = |v: &Value| if let Value::Float(x) = v { *x as f32 } else { panic!("scores are floats") };
    let code = |v: &Value| if let Value::Int(x) = v { *x as i32 } else { panic!("types are integers") };
    let source = VocabSource {
        model: text("ggml.model").expect("the file has a vocabulary"),
        pre: text("ggml.pre"),
        tokens: texts(list("tokens").expect("the file has tokens")),
        scores: list("scores").map(|l| l.iter().map(float).collect()),
        token_types: list("token_type").map(|l| l.iter().map(code).collect()),
        merges: list("merges").map(texts),
        bos: id("bos_token_id"),
        eos: id("eos_token_id"),
        unk: id("unknown_token_id"),
        pad: id("padding_token_id"),
        add_bos: int("add_bos_token").map(|x| x != 0),
        add_eos: int("add_eos_token").map(|x| x != 0),
        add_space_prefix: int("add_space_prefix").map(|x| x != 0),
        ..VocabSource::default()
    };
    (source, text("chat_template"))
}
