//! A parsed instruction, and the queries of a decoder: its modifiers, and its operands as registers, constants and
//! addresses.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::error::{DecodeError, Result};
use super::form;
use super::names::{Names, Symbol};
use crate::code::{Flow, Step, Uses};
use crate::hw::sums::{self, Adder, Family, Kind};
use crate::machine::warp::Warp;
use crate::operand::{Address, Dst, PredicateDst, PredicateSrc, Special, Src};
use crate::parser::ast::{Instruction, Operand};
use crate::types::{Space, Type};

/// A parsed instruction in the context of its kernel's names.
pub struct Parsed<'a> {
    instruction: &'a Instruction,
    /// Forms of the instruction's opcode.
    forms: Vec<&'static str>,
    pub(super) names: &'a mut Names,
    /// Uses recorded so far.
    pub(super) uses: Uses,
    /// Steps before the instruction. Each step fills a hidden register.
    pub(super) before: Vec<(Step, u32)>,
    /// A step after the instruction, and the registers that the step writes.
    pub(super) after: Option<(Step, Vec<u32>)>,
}

/// The register of a vector register's component. `r`, `g`, `b` and `a` are other names of `x`, `y`, `z` and `w`.
fn component(name: &str, component: char) -> String {
    let element = match component {
        'r' => 'x',
        'g' => 'y',
        'b' => 'z',
        'a' => 'w',
        other => other,
    };
    format!("{name}.{element}")
}

impl<'a> Parsed<'a> {
    /// Prepares an instruction whose opcode has these forms.
    pub fn new(instruction: &'a Instruction, forms: Vec<&'static str>, names: &'a mut Names) -> Parsed<'a> {
        let aligned = instruction.modifiers.iter().any(|m| m == "aligned");
        let uses = Uses { aligned, ..Uses::default() };
        Parsed { instruction, forms, names, uses, before: Vec::new(), after: None }
    }

    /// The name before the first dot.
    pub fn opcode(&self) -> &'a str {
        &self.instruction.opcode
    }

    /// Whether the instruction has a guard predicate.
    pub fn has_guard(&self) -> bool {
        self.instruction.guard.is_some()
    }

    /// The modifiers in their written order, without dots.
    pub fn modifiers(&self) -> &'a [String] {
        &self.instruction.modifiers
    }

    /// Whether the instruction has a modifier.
    ///
    /// # Panics
    /// With debug assertions, if no form of the opcode has the modifier, which means that the decoder misspells it.
    pub fn has(&self, modifier: &str) -> bool {
        let known = || self.forms.iter().any(|form| form::has_word(form, modifier));
        debug_assert!(known(), "no form of `{}` has the modifier `{modifier}`", self.opcode());
        self.modifiers().iter().any(|m| m == modifier)
    }

    /// The first of `modifiers` that the instruction has.
    ///
    /// # Panics
    /// Like [`Parsed::has`].
    pub fn one_of(&self, modifiers: &[&'static str]) -> Option<&'static str> {
        modifiers.iter().copied().filter(|modifier| self.has(modifier)).reduce(|first, _| first)
    }

    /// The modifiers that are types, in order.
    pub fn types(&self) -> Vec<Type> {
        self.instruction.types()
    }

    /// The last type among the modifiers: the type of the operation for most instructions.
    pub fn ty(&self) -> Result<Type> {
        self.instruction.ty().ok_or_else(|| DecodeError::invalid("the type modifier is missing"))
    }

    /// The state space among the modifiers.
    pub fn space(&self) -> Option<Space> {
        self.instruction.space()
    }

    /// State space of an access at an address. Without a space, the address is generic.
    pub fn space_at(&self, address: &Address) -> Space {
        address.space(self.space().unwrap_or(Space::Generic))
    }

    /// The operands as written.
    pub fn operands(&self) -> &'a [Operand] {
        &self.instruction.operands
    }

    /// Operand `n`.
    pub fn operand(&self, n: usize) -> Result<&'a Operand> {
        self.operands().get(n).ok_or_else(|| DecodeError::invalid(format!("operand {} is missing", n + 1)))
    }

    /// Parts of operand `n`: the elements of a vector in braces, or the operand itself.
    pub fn parts(&self, n: usize) -> Result<&'a [Operand]> {
        Ok(match self.operand(n)? {
            Operand::Vector(parts) => parts,
            single => std::slice::from_ref(single),
        })
    }

    /// Operand `n` as an integer that must be constant. `what` names it in the error message.
    pub fn constant(&mut self, n: usize, what: &str) -> Result<u64> {
        match self.src(n, Type::U32)? {
            Src::Constant(value) => Ok(value),
            Src::Register(_) => Err(DecodeError::invalid(format!("{what} must be a constant"))),
        }
    }

    /// Parts of operand `n` as sources of a type.
    pub fn src_vector(&mut self, n: usize, ty: Type) -> Result<Vec<Src>> {
        self.parts(n)?.iter().map(|part| self.src_operand(part, ty)).collect()
    }

    /// Parts of operand `n` as destinations.
    pub fn dst_vector(&mut self, n: usize) -> Result<Vec<Dst>> {
        self.parts(n)?.iter().map(|part| self.dst_operand(part)).collect()
    }

    /// Marks the instruction as a move: undefined sources make the result undefined.
    pub fn moves(&mut self) {
        self.uses.moves = true;
    }

    /// Sets how undefined bits propagate from sources to destinations. By default, all destination bits become
    /// undefined.
    pub fn carries(&mut self, carries: impl Fn(&Warp, usize) -> Vec<(u32, u64)> + Send + Sync + 'static) {
        self.uses.carries = Some(Box::new(carries));
    }

    /// Sets in which lanes undefined sources make destination predicates undefined. By default, in all.
    pub fn decides(&mut self, decides: impl Fn(&Warp, u32) -> Vec<(u32, u32)> + Send + Sync + 'static) {
        self.uses.decides = Some(Box::new(decides));
    }

    /// Marks the sources decoded after this call as values that are only stored.
    pub fn stores_from_here(&mut self) {
        self.uses.stored_from = Some(self.uses.reads.len());
    }

    /// Marks the instruction as waiting for the warp's loads from shared memory, whatever registers it uses.
    pub fn awaits_loads(&mut self) {
        self.uses.awaits_loads = true;
    }

    /// Marks the instruction as executed by whole warps.
    pub fn aligned(&mut self) {
        self.uses.aligned = true;
    }

    /// Marks an `.aligned` instruction as executed by any lanes.
    pub fn by_any_lanes(&mut self) {
        self.uses.aligned = false;
    }

    /// Removes the destinations so far from the instruction's writes: they are written later, when a wait completes.
    pub fn writes_later(&mut self) {
        self.uses.writes.clear();
    }

    /// Marks the kernel as using asynchronous matrix instructions with registers.
    pub fn uses_wgmma(&mut self) {
        self.names.kernel.uses_wgmma = true;
    }

    /// How the GPU of the module's target adds the products of a matrix instruction.
    pub fn adder(&self, instruction: sums::Instruction, kind: Kind, sparse: bool) -> Adder {
        let adder = Adder::of(Family::of_target(&self.names.ast.target), instruction, kind);
        if sparse { adder.sparse() } else { adder }
    }

    /// Records that the instruction reads `src` as scale factors in `lanes`. Returns the mask of lanes in which any
    /// instruction of the kernel reads that register. The mask is complete once the kernel is decoded.
    pub fn reads_scales(&mut self, src: Src, lanes: u32) -> Arc<AtomicU32> {
        let Src::Register(register) = src else { return Arc::new(AtomicU32::new(u32::MAX)) };
        let scales = self.names.kernel.scales.entry(register).or_default();
        scales.uses += 1;
        scales.lanes.fetch_or(lanes, Ordering::Relaxed);
        Arc::clone(&scales.lanes)
    }

    /// Registers per thread at launch, if the entry's directives give them.
    pub fn registers_at_launch(&self) -> Option<u32> {
        self.names.kernel.limits.registers_at_launch()
    }

    /// Marks the kernel as using tensor memory.
    pub fn uses_tmem(&mut self) {
        self.names.kernel.uses_tmem = true;
    }

    /// Sets the kernel's CTA group for tensor memory, unless an earlier instruction has. Returns the kernel's group.
    pub fn set_cta_group(&mut self, group: u32) -> u32 {
        *self.names.kernel.cta_group.get_or_insert(group)
    }

    /// Marks the instruction as possibly carrying information between clusters.
    pub fn communicates(&mut self) {
        self.names.kernel.communicates = true;
        self.uses.communicates = true;
    }

    /// Operand `n` as a value of a type of at most 64 bits.
    pub fn src(&mut self, n: usize, ty: Type) -> Result<Src> {
        self.src_operand(self.operand(n)?, ty)
    }

    pub fn src_operand(&mut self, operand: &Operand, ty: Type) -> Result<Src> {
        let ones = u64::MAX >> (64 - ty.bits().min(64));
        let special = |name: &str, component| Special::parse(name, component);
        Ok(match operand {
            Operand::Int(v) => Src::Constant(match ty {
                Type::F32 => u64::from((*v as i64 as f32).to_bits()),
                Type::F64 => (*v as i64 as f64).to_bits(),
                _ => v & ones,
            }),
            Operand::F64(v) => Src::Constant(match ty.bits() {
                64 => v.to_bits(),
                _ => u64::from((*v as f32).to_bits()),
            }),
            Operand::F32(v) => Src::Constant(match ty.bits() {
                64 if ty == Type::F64 => f64::from(f32::from_bits(*v)).to_bits(),
                _ => u64::from(*v),
            }),
            Operand::Name(name) => match self.names.lookup(name).cloned() {
                Some(Symbol::Register { index, bits }) => {
                    if bits < ty.bits() {
                        return Err(DecodeError::invalid(format!(
                            "`{name}` has {bits} bits, but the instruction needs {}",
                            ty.bits()
                        )));
                    }
                    self.read(index, bits);
                    Src::Register(index)
                }
                Some(Symbol::Predicate(_)) => {
                    return Err(DecodeError::invalid(format!("`{name}` is a predicate; expected a value")));
                }
                _ => match special(name, None) {
                    Some(s) => self.names.special(s),
                    None => self.timer(name).map_or_else(|| self.names.address_of(name).map(|a| a.0), Ok)?,
                },
            },
            Operand::Component(name, c) => match special(name, Some(*c)) {
                Some(s) => self.names.special(s),
                None => return self.src_operand(&Operand::Name(component(name, *c)), ty),
            },
            Operand::Address { base: Some(base), offset, extra } if extra.is_empty() => {
                let Operand::Name(name) = &**base else {
                    return Err(DecodeError::invalid("expected a variable"));
                };
                // `symbol + offset` as a value.
                let (base, _) = self.names.address_of(name)?;
                self.sum(base, *offset)
            }
            other => {
                return Err(DecodeError::invalid(format!("expected a register or constant, found {other:?}")));
            }
        })
    }

    /// The sum of a register and an offset, in a hidden register that a step before the instruction fills.
    fn sum(&mut self, base: Src, offset: i64) -> Src {
        if let Src::Constant(c) = base {
            return Src::Constant(c.wrapping_add(offset as u64));
        }
        let hidden = self.names.kernel.registers;
        self.names.kernel.registers += 1;
        let step: Step = Box::new(move |w, _, mask| {
            let row = w.get(base).map(|v| v.wrapping_add(offset as u64));
            w.set(hidden, mask, &row);
            Ok(Flow::Next)
        });
        self.before.push((step, hidden));
        self.read(hidden, 64);
        Src::Register(hidden)
    }

    /// A clock register. Timed launches give cycles and nanoseconds. Otherwise clocks count the cluster's warp
    /// instructions.
    fn timer(&mut self, name: &str) -> Option<Src> {
        let (shift, nanoseconds) = match name {
            "%clock" | "%clock64" => (0, false),
            "%clock_hi" => (32, false),
            "%globaltimer" | "%globaltimer_lo" => (0, true),
            "%globaltimer_hi" => (32, true),
            _ => return None,
        };
        let hidden = self.names.kernel.registers;
        self.names.kernel.registers += 1;
        let step: Step = Box::new(move |w, m, mask| {
            let now = match &m.timed {
                Some(timed) if nanoseconds => (timed.card.microseconds(timed.now) * 1e3) as u64,
                Some(timed) => timed.now,
                None => m.clock.now,
            };
            w.set(hidden, mask, &[now >> shift; 32]);
            Ok(Flow::Next)
        });
        self.before.push((step, hidden));
        self.read(hidden, 64);
        Some(Src::Register(hidden))
    }

    fn read(&mut self, index: u32, bits: u32) {
        self.uses.reads.extend(index..index + bits.div_ceil(64));
    }

    /// Operand `n` as `[address]`.
    pub fn address(&mut self, n: usize) -> Result<Address> {
        self.address_operand(self.operand(n)?)
    }

    pub fn address_operand(&mut self, operand: &Operand) -> Result<Address> {
        let Operand::Address { base, offset, .. } = operand else {
            return Err(DecodeError::invalid("expected an address in brackets"));
        };
        let Some(base) = base else {
            return Ok(Address { base: Src::Constant(*offset as u64), offset: 0, variable: None });
        };
        let Operand::Name(name) = &**base else {
            return Err(DecodeError::invalid("expected a register or variable"));
        };
        match self.names.lookup(name).cloned() {
            Some(Symbol::Register { index, bits }) => {
                self.read(index, bits);
                self.uses.address = Some((Some(index), *offset));
                Ok(Address { base: Src::Register(index), offset: *offset, variable: None })
            }
            _ => {
                let (base, space) = self.names.address_of(name)?;
                if let Src::Constant(at) = base {
                    self.uses.address = Some((None, at as i64 + *offset));
                }
                Ok(Address { base, offset: *offset, variable: Some(space) })
            }
        }
    }

    /// Operand `n` as an address value: a register or a variable's name.
    pub fn address_value(&mut self, n: usize) -> Result<Src> {
        self.src(n, Type::B32)
    }

    /// Operand `n` as a destination.
    pub fn dst(&mut self, n: usize) -> Result<Dst> {
        self.dst_operand(self.operand(n)?)
    }

    pub fn dst_operand(&mut self, operand: &Operand) -> Result<Dst> {
        match operand {
            Operand::Discard => Ok(Dst { register: None, bits: 64 }),
            Operand::Name(name) => match self.names.lookup(name) {
                Some(&Symbol::Register { index, bits }) => {
                    self.uses.writes.extend(index..index + bits.div_ceil(64));
                    Ok(Dst { register: Some(index), bits: bits.min(64) })
                }
                Some(_) => Err(DecodeError::invalid(format!("`{name}` is not a register"))),
                None => Err(DecodeError::invalid(format!("`{name}` is not declared"))),
            },
            Operand::Component(name, c) => self.dst_operand(&Operand::Name(component(name, *c))),
            other => Err(DecodeError::invalid(format!("expected a destination register, found {other:?}"))),
        }
    }

    /// A source as 64-bit words: two for `.b128`, else one.
    pub fn words(&mut self, operand: &Operand, ty: Type) -> Result<Vec<Src>> {
        if ty.bits() <= 64 {
            return Ok(vec![self.src_operand(operand, ty)?]);
        }
        match operand {
            Operand::Name(name) => match self.names.lookup(name).cloned() {
                Some(Symbol::Register { index, bits: 128 }) => {
                    self.read(index, 128);
                    Ok(vec![Src::Register(index), Src::Register(index + 1)])
                }
                _ => Err(DecodeError::invalid(format!("`{name}` is not a 128-bit register"))),
            },
            Operand::Int(v) => Ok(vec![Src::Constant(*v), Src::Constant(0)]),
            _ => Err(DecodeError::invalid("expected a 128-bit register")),
        }
    }

    /// A destination as 64-bit words: two for `.b128`, else one.
    pub fn dst_words(&mut self, operand: &Operand, ty: Type) -> Result<Vec<Dst>> {
        let first = self.dst_operand(operand)?;
        if ty.bits() <= 64 {
            return Ok(vec![first]);
        }
        match operand {
            Operand::Discard => Ok(vec![first, first]),
            Operand::Name(name) if matches!(self.names.lookup(name), Some(Symbol::Register { bits: 128, .. })) => {
                let second = Dst { register: first.register.map(|r| r + 1), bits: 64 };
                Ok(vec![first, second])
            }
            _ => Err(DecodeError::invalid("expected a 128-bit register")),
        }
    }

    /// Operand `n` as a predicate.
    pub fn predicate(&mut self, n: usize) -> Result<PredicateSrc> {
        self.predicate_operand(self.operand(n)?)
    }

    pub fn predicate_operand(&mut self, operand: &Operand) -> Result<PredicateSrc> {
        match operand {
            Operand::Int(v) => Ok(PredicateSrc::Constant(*v != 0)),
            Operand::Not(inner) => Ok(match self.predicate_operand(inner)? {
                PredicateSrc::Register(p, negated) => PredicateSrc::Register(p, !negated),
                PredicateSrc::Constant(c) => PredicateSrc::Constant(!c),
            }),
            Operand::Name(name) => match self.names.lookup(name) {
                Some(&Symbol::Predicate(p)) => {
                    self.uses.predicate_reads.push(p);
                    Ok(PredicateSrc::Register(p, false))
                }
                _ => Err(DecodeError::invalid(format!("`{name}` is not a predicate"))),
            },
            _ => Err(DecodeError::invalid("expected a predicate")),
        }
    }

    /// Operand `n` as a predicate to write.
    pub fn predicate_dst(&mut self, n: usize) -> Result<PredicateDst> {
        self.predicate_dst_operand(self.operand(n)?)
    }

    pub fn predicate_dst_operand(&mut self, operand: &Operand) -> Result<PredicateDst> {
        match operand {
            Operand::Discard => Ok(PredicateDst(None)),
            Operand::Name(name) => match self.names.lookup(name) {
                Some(&Symbol::Predicate(p)) => {
                    self.uses.predicate_writes.push(p);
                    Ok(PredicateDst(Some(p)))
                }
                _ => Err(DecodeError::invalid(format!("`{name}` is not a predicate"))),
            },
            _ => Err(DecodeError::invalid("expected a predicate")),
        }
    }

    /// Whether an operand is a predicate register.
    pub fn is_predicate(&self, operand: &Operand) -> bool {
        matches!(operand, Operand::Name(name) if self.names.is_predicate(name))
    }

    /// Operand `n` as the number of a label, to which the instruction jumps.
    pub fn label(&mut self, n: usize) -> Result<u32> {
        let label = self.names.label(self.name(n)?)?;
        self.names.kernel.targets.push(label);
        self.uses.jump = Some(label);
        Ok(label)
    }

    /// Operand `n` as a list of labels (`.branchtargets`).
    pub fn targets(&mut self, n: usize) -> Result<Vec<u32>> {
        let targets = self.names.targets(self.name(n)?)?;
        self.names.kernel.targets.extend(&targets);
        Ok(targets)
    }

    fn name(&self, n: usize) -> Result<&'a str> {
        match self.operand(n)? {
            Operand::Name(name) => Ok(name),
            _ => Err(DecodeError::invalid("expected a label")),
        }
    }

    /// The hidden condition-code register, which the instruction reads or writes.
    pub fn carry_flag(&mut self, read: bool, write: bool) -> u32 {
        let flag = self.names.carry_flag();
        self.uses.predicate_reads.extend(read.then_some(flag));
        self.uses.predicate_writes.extend(write.then_some(flag));
        flag
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::code::Kernel;

    fn with_forms<T>(forms: Vec<&'static str>, f: impl FnOnce(Parsed<'_>) -> T) -> T {
        let instruction = Instruction {
            guard: None,
            opcode: "tcgen05".into(),
            modifiers: vec!["cp".into(), "cta_group::2".into()],
            operands: Vec::new(),
            line: 1,
            source: Default::default(),
        };
        let mut names = Names::new(&Rc::default(), &Rc::default(), Kernel::default());
        f(Parsed::new(&instruction, forms, &mut names))
    }

    const FORMS: [&str; 2] = ["cp {cta_group::1 cta_group::2}", "shift [down]"];

    #[test]
    fn modifiers_of_every_form_can_be_queried() {
        with_forms(FORMS.into(), |i| {
            assert!(i.has("cta_group::2") && !i.has("cta_group::1") && !i.has("down"));
            assert_eq!(i.one_of(&["down", "cta_group::1", "cta_group::2"]), Some("cta_group::2"));
        });
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "the check is a debug assertion")]
    #[should_panic(expected = "no form of `tcgen05` has the modifier `cta_gruop::2`")]
    fn misspelled_modifier_is_detected() {
        with_forms(FORMS.into(), |i| i.has("cta_gruop::2"));
    }

    #[test]
    #[cfg_attr(not(debug_assertions), ignore = "the check is a debug assertion")]
    #[should_panic(expected = "no form of `tcgen05` has the modifier `dwon`")]
    fn misspelled_modifier_among_several_is_detected() {
        with_forms(FORMS.into(), |i| i.one_of(&["cta_group::2", "dwon"]));
    }
}
