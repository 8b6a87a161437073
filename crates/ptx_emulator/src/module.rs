//! A PTX file, parsed and decoded: its entries and its module-scope variables.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::code::Kernel;
use crate::decode::kernel;
use crate::exec::opcodes::OPCODES;
use crate::machine::address::{CODE_WINDOW, MODULE_STRIDE};
use crate::parser;
use crate::parser::ast::Variable;
use crate::parser::error::ParseError;
use crate::types::Space;

/// A loaded module. All code is decoded once, so repeated launches are cheap.
pub struct Module {
    pub(crate) id: u64,
    kernels: Vec<Kernel>,
    /// Global and constant variables.
    pub(crate) variables: Vec<Variable>,
    /// Addresses of functions that variables may hold.
    pub(crate) functions: HashMap<String, u64>,
}

impl Module {
    /// Parses PTX text and decodes its entries.
    ///
    /// An unknown instruction is not an error here. [`Kernel::unsupported`] lists unknown instructions. A kernel that
    /// executes one ends with [`FaultKind::Unsupported`](crate::FaultKind::Unsupported).
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut ast = parser::parse(text)?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        ast.code_at = CODE_WINDOW + id * MODULE_STRIDE;
        let sources = Arc::new(std::mem::take(&mut ast.sources));
        let variables: Vec<Variable> =
            ast.variables.iter().filter(|v| matches!(v.space, Space::Global | Space::Const)).cloned().collect();
        let numbers: HashMap<String, u32> =
            variables.iter().enumerate().map(|(n, v)| (v.name.clone(), n as u32)).collect();
        let (ast, numbers) = (Rc::new(ast), Rc::new(numbers));
        let entries = ast.functions.iter().filter(|f| f.entry && f.body.is_some());
        let kernels =
            entries.map(|f| kernel::decode(&ast, &sources, f, &numbers, OPCODES)).collect::<Result<_, _>>()?;
        let functions =
            ast.functions_taken().into_iter().filter_map(|name| Some((name.to_owned(), ast.function_address(name)?)));
        let functions = functions.collect();
        Ok(Module { id, kernels, variables, functions })
    }

    /// Entries, in the order of the file.
    pub fn entries(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Entry with this name.
    pub fn entry(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|k| k.name == name)
    }
}
