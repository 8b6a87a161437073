//! A row of the table of opcodes.

use super::error::Result;
use super::form;
use super::parsed::Parsed;
use crate::code::Step;
use crate::config::report::Class;
use crate::parser::ast::Instruction;

/// What an instruction is decoded to.
pub type Decoded = Result<Step>;

/// Decodes an instruction.
pub type Handler = fn(&mut Parsed<'_>) -> Decoded;

/// One opcode with one form of its modifiers.
pub struct Opcode {
    /// The name before the first dot.
    pub name: &'static str,
    /// The modifiers it takes.
    pub form: &'static str,
    /// Title of its section in the PTX ISA manual.
    pub section: &'static str,
    /// What it is counted as.
    pub class: Class,
    pub(crate) handler: Handler,
}

/// The row that an instruction is of.
pub fn find<'a>(table: &'a [Opcode], instruction: &Instruction) -> Option<&'a Opcode> {
    table.iter().find(|o| o.name == instruction.opcode && form::allows(o.form, &instruction.modifiers))
}

/// The forms of an opcode.
pub fn forms(table: &'static [Opcode], name: &str) -> Vec<&'static str> {
    table.iter().filter(|o| o.name == name).map(|o| o.form).collect()
}

/// Whether the table has the opcode in any form.
pub fn knows(table: &[Opcode], name: &str) -> bool {
    table.iter().any(|o| o.name == name)
}
