//! The few functions of NVRTC that compile a source to PTX.

use std::ffi::{CStr, CString, NulError, c_char, c_int, c_void};
use std::ptr;

use libloading::Library;

/// What went wrong in NVRTC.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NvrtcError {
    #[error(
        "there is no NVRTC to load ({0}); `pip install nvidia-cuda-nvrtc-cu12==12.0.140` has one, see --nvrtc"
    )]
    Missing(#[source] libloading::Error),
    #[error("not a library of NVRTC")]
    Symbol(#[source] libloading::Error),
    #[error("a text for NVRTC has a zero in it")]
    Zero(#[from] NulError),
    #[error("NVRTC answers {code} in {call}: {log}")]
    Failed { call: &'static str, code: c_int, log: String },
}

type Program = *mut c_void;

/// NVRTC, loaded.
pub(crate) struct Nvrtc {
    library: Library,
}

macro_rules! call {
    ($self:ident, $log:expr, $name:literal, ($($ty:ty),*), $($arg:expr),*) => {{
        // SAFETY: NVRTC-SIGNATURES: the type is that of the function's declaration in nvrtc.h of CUDA 12.0.
        let function = unsafe { $self.library.get::<unsafe extern "C" fn($($ty),*) -> c_int>($name) };
        let function = function.map_err(NvrtcError::Symbol)?;
        // SAFETY: NVRTC-SIGNATURES; pointers lead to texts that end with zero, or to places for what is asked for, and
        // all of them outlive the call.
        let code = unsafe { function($($arg),*) };
        if code != 0 {
            let name = CStr::from_bytes_with_nul($name).map_or("", |n| n.to_str().unwrap_or(""));
            return Err(NvrtcError::Failed { call: name, code, log: $log });
        }
    }};
}

impl Nvrtc {
    /// Loads the library at `path`, or where the loader finds it.
    pub(crate) fn load(path: Option<&str>) -> Result<Self, NvrtcError> {
        let name = path.unwrap_or("libnvrtc.so.12");
        // SAFETY: NVRTC-SIGNATURES: the initialisers of a library of NVRTC ask for nothing.
        let library = unsafe { Library::new(name) }.map_err(NvrtcError::Missing)?;
        Ok(Self { library })
    }

    /// Compiles `source` under these options.
    pub(crate) fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(String, String)],
        options: &[String],
    ) -> Result<String, NvrtcError> {
        let c_strings = |texts: &mut dyn Iterator<Item = &str>| {
            texts.map(CString::new).collect::<Result<Vec<CString>, NulError>>()
        };
        let (source, name) = (CString::new(source)?, CString::new(name)?);
        let header_names = c_strings(&mut headers.iter().map(|h| h.0.as_str()))?;
        let header_texts = c_strings(&mut headers.iter().map(|h| h.1.as_str()))?;
        let options = c_strings(&mut options.iter().map(String::as_str))?;
        let pointers = |texts: &[CString]| texts.iter().map(|t| t.as_ptr()).collect::<Vec<*const c_char>>();
        let (names, texts, option_texts) =
            (pointers(&header_names), pointers(&header_texts), pointers(&options));
        let mut program: Program = ptr::null_mut();
        call!(
            self,
            String::new(),
            b"nvrtcCreateProgram\0",
            (*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char),
            &raw mut program,
            source.as_ptr(),
            name.as_ptr(),
            texts.len() as c_int,
            texts.as_ptr(),
            names.as_ptr()
        );
        call!(
            self,
            self.log(program).unwrap_or_default(),
            b"nvrtcCompileProgram\0",
            (Program, c_int, *const *const c_char),
            program,
            option_texts.len() as c_int,
            option_texts.as_ptr()
        );
        let mut n = 0usize;
        call!(self, String::new(), b"nvrtcGetPTXSize\0", (Program, *mut usize), program, &raw mut n);
        let mut text = vec![0u8; n];
        call!(
            self,
            String::new(),
            b"nvrtcGetPTX\0",
            (Program, *mut c_char),
            program,
            text.as_mut_ptr().cast()
        );
        call!(self, String::new(), b"nvrtcDestroyProgram\0", (*mut Program), &raw mut program);
        Ok(until_zero(&text))
    }

    fn log(&self, program: Program) -> Result<String, NvrtcError> {
        let mut n = 0usize;
        call!(self, String::new(), b"nvrtcGetProgramLogSize\0", (Program, *mut usize), program, &raw mut n);
        let mut text = vec![0u8; n];
        call!(
            self,
            String::new(),
            b"nvrtcGetProgramLog\0",
            (Program, *mut c_char),
            program,
            text.as_mut_ptr().cast()
        );
        Ok(until_zero(&text))
    }
}

fn until_zero(text: &[u8]) -> String {
    String::from_utf8_lossy(text.split(|&b| b == 0).next().unwrap_or_default()).into_owned()
}
