//! Rows of the opcode table.

use super::error::Result;
use super::form;
use super::parsed::Parsed;
use crate::code::Step;
use crate::config::report::Class;
use crate::parser::ast::Instruction;

/// Result of decoding an instruction.
pub type Decoded = Result<Step>;

/// Decodes an instruction.
pub type Handler = fn(&mut Parsed<'_>) -> Decoded;

/// One opcode with one form of its modifiers.
pub struct Opcode {
    /// The name before the first dot.
    pub name: &'static str,
    /// The allowed modifiers.
    pub form: &'static str,
    /// Title of the opcode's section in the PTX ISA manual.
    pub section: &'static str,
    /// Class under which the opcode is counted.
    pub class: Class,
    pub(crate) handler: Handler,
}

/// Finds the row that matches an instruction.
pub fn find<'a>(table: &'a [Opcode], instruction: &Instruction) -> Option<&'a Opcode> {
    table.iter().find(|o| o.name == instruction.opcode && form::allows(o.form, &instruction.modifiers))
}

/// All forms of an opcode.
pub fn forms(table: &'static [Opcode], name: &str) -> Vec<&'static str> {
    table.iter().filter(|o| o.name == name).map(|o| o.form).collect()
}

/// Whether the table has a form of the opcode.
pub fn knows(table: &[Opcode], name: &str) -> bool {
    table.iter().any(|o| o.name == name)
}
