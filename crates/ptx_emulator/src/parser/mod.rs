//! Parses PTX text to [`ast::Ast`], by recursive descent through the manual's grammar (PTX ISA, "Syntax", "State
//! Spaces, Types, and Variables", "Abstracting the ABI", "Directives"). The parser knows no opcode: any word with
//! dotted modifiers is an instruction. Invalid text gives an error with its line, never a panic.

pub mod ast;
pub mod error;
mod lexer;
pub mod source;

use ast::*;
use error::ParseError;
use lexer::{Token, integer, tokenize};
use source::{SourceLine, Sources};

use crate::types::{Space, Type};

type Result<T> = std::result::Result<T, ParseError>;

/// Maximum nesting depth of scopes and expressions. The limit keeps invalid text from overflowing the stack.
const MAX_DEPTH: u32 = 100;
/// Maximum number of registers in one `%r<n>` declaration.
const MAX_REGISTERS: u32 = 1 << 16;
/// Maximum size of a variable, in bytes.
const MAX_VARIABLE: u64 = 1 << 32;
/// Maximum size of a kernel's parameters, in bytes (PTX ISA 8.1 and newer, sm_70 and up).
pub const MAX_PARAM_BYTES: u64 = 32764;

/// Parses a whole file.
pub fn parse(text: &str) -> Result<Ast> {
    let tokens = tokenize(text)?;
    let ast = Ast { sources: Sources::of_text(text), ..Ast::default() };
    let mut p = Parser { tokens: &tokens, at: 0, depth: 0, source: SourceLine::default(), ast };
    p.module()?;
    Ok(p.ast)
}

struct Parser<'a> {
    tokens: &'a [(Token<'a>, u32)],
    at: usize,
    depth: u32,
    source: SourceLine,
    ast: Ast,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens[self.at].0
    }

    fn peek2(&self) -> Token<'a> {
        self.tokens.get(self.at + 1).map_or(Token::End, |t| t.0)
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].1
    }

    fn next(&mut self) -> Token<'a> {
        let token = self.peek();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        token
    }

    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        Err(ParseError::new(self.line(), message))
    }

    fn eat(&mut self, c: char) -> bool {
        let found = self.peek() == Token::Punct(c);
        if found {
            self.next();
        }
        found
    }

    fn eat_dot(&mut self, name: &str) -> bool {
        let found = self.peek() == Token::Dot(name);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, c: char) -> Result<()> {
        if self.eat(c) { Ok(()) } else { self.error(format!("expected `{c}`, found {}", self.found())) }
    }

    fn found(&self) -> String {
        match self.peek() {
            Token::Word(w) => format!("`{w}`"),
            Token::Dot(w) => format!("`.{w}`"),
            Token::Number(w) => format!("`{w}`"),
            Token::Text(w) => format!("\"{w}\""),
            Token::Punct(c) => format!("`{c}`"),
            Token::End => "the end of the file".into(),
        }
    }

    fn word(&mut self, what: &str) -> Result<&'a str> {
        match self.peek() {
            Token::Word(w) => {
                self.next();
                Ok(w)
            }
            _ => self.error(format!("expected {what}, found {}", self.found())),
        }
    }

    fn nested<T>(&mut self, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= MAX_DEPTH {
            return self.error("scopes or expressions are nested too deeply");
        }
        self.depth += 1;
        let result = f(self);
        self.depth -= 1;
        result
    }

    /// Skips the rest of the line of the last token.
    fn skip_line(&mut self) {
        let line = self.tokens[self.at.saturating_sub(1)].1;
        while self.line() == line && self.peek() != Token::End {
            self.next();
        }
    }

    fn skip_to(&mut self, c: char) {
        while self.peek() != Token::End && !self.eat(c) {
            self.next();
        }
    }

    fn skip_braces(&mut self) -> Result<()> {
        self.expect('{')?;
        let mut open = 1;
        while open > 0 {
            match self.next() {
                Token::Punct('{') => open += 1,
                Token::Punct('}') => open -= 1,
                Token::End => return self.error("this section is not closed; add `}`"),
                _ => {}
            }
        }
        Ok(())
    }

    fn module(&mut self) -> Result<()> {
        if !self.eat_dot("version") {
            return self.error("a PTX file must start with `.version`");
        }
        self.skip_line();
        loop {
            match self.peek() {
                Token::End => break,
                Token::Dot("target") => {
                    self.next();
                    self.ast.target = self.word("a target such as sm_90a")?.to_string();
                    self.skip_line();
                }
                Token::Dot("address_size") => {
                    self.next();
                    if self.uint()? != 64 {
                        return self.error("only `.address_size 64` is supported");
                    }
                }
                Token::Dot("file") => {
                    self.next();
                    let number = self.uint()? as u32;
                    if let Token::Text(name) = self.next() {
                        self.ast.sources.files.insert(number, name.to_string());
                    }
                    while self.eat(',') {
                        self.next();
                    }
                }
                Token::Dot("section") => {
                    self.next();
                    self.next();
                    self.skip_braces()?;
                }
                Token::Dot("pragma" | "alias") => self.skip_to(';'),
                Token::Dot(
                    "visible" | "extern" | "weak" | "common" | "entry" | "func" | "global" | "const" | "shared" | "tex"
                    | "surf" | "sampler",
                ) => self.linked()?,
                _ => {
                    return self.error(format!("expected a module directive, found {}", self.found()));
                }
            }
        }
        if self.ast.target.is_empty() {
            return self.error("`.target` is missing");
        }
        Ok(())
    }

    /// Parses a module-scope declaration with its linking directives.
    fn linked(&mut self) -> Result<()> {
        let mut external = false;
        loop {
            match self.peek() {
                Token::Dot("extern") => external = true,
                Token::Dot("visible" | "weak" | "common") => {}
                _ => break,
            }
            self.next();
        }
        match self.peek() {
            Token::Dot("entry" | "func") => self.function(),
            Token::Dot(space) if Space::parse(space).is_some() => {
                let mut list = Vec::new();
                self.variables(&mut list)?;
                for mut v in list {
                    v.external = external;
                    self.ast.variables.push(v);
                }
                Ok(())
            }
            _ => self.error(format!("expected `.entry`, `.func` or a variable, found {}", self.found())),
        }
    }

    fn function(&mut self) -> Result<()> {
        let line = self.line();
        let entry = self.next() == Token::Dot("entry");
        let results = if self.peek() == Token::Punct('(') { self.formals()? } else { Vec::new() };
        let name = self.word("a function name")?.to_string();
        let params = if self.peek() == Token::Punct('(') { self.formals()? } else { Vec::new() };
        if entry {
            let total: u64 = params.iter().map(|p| if let Formal::Memory(v) = p { v.bytes } else { 0 }).sum();
            if total > MAX_PARAM_BYTES {
                return self
                    .error(format!("the parameters take {total} bytes; a kernel takes at most {MAX_PARAM_BYTES}"));
            }
        }
        let mut limits = Limits::default();
        loop {
            match self.peek() {
                Token::Dot("maxntid") => {
                    self.next();
                    limits.max_threads = Some(self.dims()?.iter().fold(1u32, |a, &b| a.saturating_mul(b)));
                }
                Token::Dot("reqntid") => {
                    self.next();
                    limits.required_threads = Some(self.dims()?);
                }
                Token::Dot("reqnctapercluster") => {
                    self.next();
                    limits.required_cluster = Some(self.dims()?);
                }
                Token::Dot("maxnreg") => {
                    self.next();
                    limits.registers = Some(self.uint()?.try_into().unwrap_or(u32::MAX));
                }
                Token::Dot("minnctapersm") => {
                    self.next();
                    limits.min_ctas = Some(self.uint()?.try_into().unwrap_or(u32::MAX));
                }
                Token::Dot("maxnctapersm" | "maxclusterrank") => {
                    self.next();
                    self.uint()?;
                }
                Token::Dot("pragma") => self.skip_to(';'),
                Token::Dot("noreturn" | "explicitcluster" | "blocksareclusters") => {
                    self.next();
                }
                Token::Dot("abi_preserve" | "abi_preserve_control") => {
                    self.next();
                    self.uint()?;
                }
                _ => break,
            }
        }
        let body = if self.eat(';') {
            None
        } else {
            self.expect('{')?;
            self.source = SourceLine::default();
            Some(self.nested(Self::statements)?)
        };
        self.ast.functions.push(Function { name, entry, results, params, limits, body, line });
        Ok(())
    }

    fn dims(&mut self) -> Result<[u32; 3]> {
        let mut dims = [1; 3];
        for (i, d) in dims.iter_mut().enumerate() {
            if i > 0 && !self.eat(',') {
                break;
            }
            *d = self.uint()? as u32;
        }
        Ok(dims)
    }

    fn formals(&mut self) -> Result<Vec<Formal>> {
        self.expect('(')?;
        let mut list = Vec::new();
        while !self.eat(')') {
            if !list.is_empty() {
                self.expect(',')?;
            }
            if self.eat_dot("reg") {
                let Token::Dot(ty) = self.next() else {
                    return self.error("expected a type");
                };
                let ty = self.ty(ty)?;
                let name = self.word("a parameter name")?.to_string();
                list.push(Formal::Register { name, ty });
            } else if self.eat_dot("param") {
                list.push(Formal::Memory(self.declarator_one(Space::Param)?));
            } else {
                return self.error(format!("expected `.param` or `.reg`, found {}", self.found()));
            }
        }
        Ok(list)
    }

    fn ty(&self, name: &str) -> Result<Type> {
        match Type::parse(name) {
            Some(ty) => Ok(ty),
            None => self.error(format!("`.{name}` is not a type")),
        }
    }

    /// `.space [.align n] [.vN] .type name[dims] [= init], …;`
    fn variables(&mut self, out: &mut Vec<Variable>) -> Result<()> {
        let Token::Dot(space) = self.next() else {
            return self.error("expected a state space");
        };
        let Some(space) = Space::parse(space) else {
            return self.error(format!("`.{space}` is not a state space"));
        };
        let head = self.declaration_head()?;
        loop {
            out.push(self.declarator(space, head)?);
            if !self.eat(',') {
                break;
            }
        }
        self.expect(';')
    }

    fn declarator_one(&mut self, space: Space) -> Result<Variable> {
        let head = self.declaration_head()?;
        self.declarator(space, head)
    }

    /// Parses alignment (0: natural), number of vector elements, and element type.
    fn declaration_head(&mut self) -> Result<(u32, u32, Type)> {
        let (mut align, mut vector) = (0, 1);
        loop {
            match self.peek() {
                Token::Dot("align") => {
                    self.next();
                    align = self.uint()? as u32;
                    if !align.is_power_of_two() {
                        return self.error("the alignment must be a power of two");
                    }
                }
                Token::Dot("v2") => {
                    self.next();
                    vector = 2;
                }
                Token::Dot("v4") => {
                    self.next();
                    vector = 4;
                }
                // Managed and per-thread attributes are skipped, and so are hints on pointer parameters below.
                Token::Dot("attribute") => {
                    self.next();
                    self.skip_to(')');
                }
                Token::Dot(name) => {
                    self.next();
                    let ty = self.ty(name)?;
                    while let Token::Dot(hint @ ("ptr" | "global" | "const" | "local" | "shared" | "align")) =
                        self.peek()
                    {
                        self.next();
                        if hint == "align" {
                            self.uint()?;
                        }
                    }
                    return Ok((align, vector, ty));
                }
                _ => return self.error(format!("expected a type, found {}", self.found())),
            }
        }
    }

    fn declarator(&mut self, space: Space, (align, vector, element): (u32, u32, Type)) -> Result<Variable> {
        let line = self.line();
        let name = self.word("a variable name")?.to_string();
        let natural = element.bytes() * vector;
        let mut bytes = u64::from(natural);
        while self.eat('[') {
            let n = if self.peek() == Token::Punct(']') { 0 } else { self.constant()? };
            self.expect(']')?;
            bytes = match bytes.checked_mul(n) {
                Some(b) if b <= MAX_VARIABLE => b,
                _ => return self.error(format!("`{name}` is larger than {MAX_VARIABLE} bytes")),
            };
        }
        let mut init = Vec::new();
        if self.eat('=') {
            self.initializer(element, &mut init)?;
            if bytes == 0 {
                bytes = init.len() as u64 * u64::from(element.bytes());
            }
            if init.len() as u64 * u64::from(element.bytes()) > bytes {
                return self.error(format!("`{name}` has more initializers than elements"));
            }
        }
        let align = if align == 0 { natural } else { align };
        Ok(Variable { name, space, align, bytes, element, external: false, init, line })
    }

    fn initializer(&mut self, element: Type, out: &mut Vec<Init>) -> Result<()> {
        if self.eat('{') {
            while !self.eat('}') {
                self.nested(|p| p.initializer(element, out))?;
                if self.peek() != Token::Punct('}') {
                    self.expect(',')?;
                }
            }
            return Ok(());
        }
        if let Token::Word(w) = self.peek() {
            self.next();
            let name = if w == "generic" && self.eat('(') {
                let name = self.word("a variable name")?;
                self.expect(')')?;
                name
            } else {
                w
            };
            let mut offset = 0;
            while let Token::Punct(sign @ ('+' | '-')) = self.peek() {
                self.next();
                let n = self.constant()? as i64;
                offset += if sign == '+' { n } else { n.wrapping_neg() };
            }
            out.push(Init::Symbol { name: name.to_string(), offset });
            return Ok(());
        }
        let bits = match self.literal()? {
            Operand::Int(v) if element == Type::F32 => u64::from((v as i64 as f32).to_bits()),
            Operand::Int(v) if element == Type::F64 => (v as i64 as f64).to_bits(),
            Operand::Int(v) => v,
            Operand::F32(v) => u64::from(v),
            Operand::F64(v) if element == Type::F32 => u64::from((v as f32).to_bits()),
            Operand::F64(v) => v.to_bits(),
            _ => return self.error("expected a constant"),
        };
        out.push(Init::Bits(bits));
        Ok(())
    }

    fn uint(&mut self) -> Result<u64> {
        match self.peek() {
            Token::Number(n) => match integer(n) {
                Some(v) => {
                    self.next();
                    Ok(v)
                }
                None => self.error(format!("`{n}` is not an integer")),
            },
            _ => self.error(format!("expected an integer, found {}", self.found())),
        }
    }

    /// A constant integer expression (PTX ISA, "Constant Expressions").
    fn constant(&mut self) -> Result<u64> {
        match self.literal()? {
            Operand::Int(v) => Ok(v),
            _ => self.error("expected an integer constant"),
        }
    }

    fn literal(&mut self) -> Result<Operand> {
        self.nested(|p| p.binary(0))
    }

    fn binary(&mut self, min: u8) -> Result<Operand> {
        let mut left = self.unary()?;
        loop {
            let (op, level) = match (self.peek(), self.peek2()) {
                (Token::Punct('<'), Token::Punct('<')) => ("<<", 5),
                (Token::Punct('>'), Token::Punct('>')) => (">>", 5),
                (Token::Punct('+'), _) => ("+", 6),
                (Token::Punct('-'), _) => ("-", 6),
                (Token::Punct('*'), _) => ("*", 7),
                (Token::Punct('/'), _) => ("/", 7),
                (Token::Punct('%'), _) => ("%", 7),
                (Token::Punct('&'), _) => ("&", 4),
                (Token::Punct('^'), _) => ("^", 3),
                _ => return Ok(left),
            };
            if level <= min {
                return Ok(left);
            }
            self.next();
            if op.len() == 2 {
                self.next();
            }
            let right = self.nested(|p| p.binary(level))?;
            let (Operand::Int(a), Operand::Int(b)) = (&left, &right) else {
                return self.error("an operator needs integer constants");
            };
            let (a, b) = (*a as i64, *b as i64);
            let value = match op {
                "<<" => a.checked_shl(b as u32).unwrap_or(0),
                ">>" => a.checked_shr(b as u32).unwrap_or(0),
                "+" => a.wrapping_add(b),
                "-" => a.wrapping_sub(b),
                "*" => a.wrapping_mul(b),
                "/" | "%" if b == 0 => return self.error("division by zero in a constant expression"),
                "/" => a.wrapping_div(b),
                "%" => a.wrapping_rem(b),
                "&" => a & b,
                _ => a ^ b,
            };
            left = Operand::Int(value as u64);
        }
    }

    fn unary(&mut self) -> Result<Operand> {
        match self.peek() {
            Token::Punct('-') => {
                self.next();
                Ok(match self.nested(Self::unary)? {
                    Operand::Int(v) => Operand::Int(v.wrapping_neg()),
                    Operand::F64(v) => Operand::F64(-v),
                    Operand::F32(v) => Operand::F32(v ^ 0x8000_0000),
                    other => other,
                })
            }
            Token::Punct('+') => {
                self.next();
                self.nested(Self::unary)
            }
            Token::Punct('~') => {
                self.next();
                match self.nested(Self::unary)? {
                    Operand::Int(v) => Ok(Operand::Int(!v)),
                    _ => self.error("`~` needs an integer constant"),
                }
            }
            Token::Punct('(') => {
                self.next();
                let value = self.literal()?;
                self.expect(')')?;
                Ok(value)
            }
            Token::Word("WARP_SZ") => {
                self.next();
                Ok(Operand::Int(32))
            }
            Token::Number(n) => {
                let value = number(n);
                match value {
                    Some(v) => {
                        self.next();
                        Ok(v)
                    }
                    None => self.error(format!("`{n}` is not a number")),
                }
            }
            _ => self.error(format!("expected a constant, found {}", self.found())),
        }
    }

    fn statements(&mut self) -> Result<Vec<Statement>> {
        let mut list = Vec::new();
        loop {
            match self.peek() {
                Token::Punct('}') => {
                    self.next();
                    return Ok(list);
                }
                Token::Punct('{') => {
                    self.next();
                    list.push(Statement::Block(self.nested(Self::statements)?));
                }
                Token::Punct('@') => {
                    self.next();
                    let negated = self.eat('!');
                    let name = self.word("a predicate")?.to_string();
                    list.push(self.instruction(Some((name, negated)))?);
                }
                Token::Word(w) if self.peek2() == Token::Punct(':') => {
                    let line = self.line();
                    self.next();
                    self.next();
                    match self.peek() {
                        Token::Dot("branchtargets" | "calltargets") => {
                            self.next();
                            let mut names = vec![self.word("a label")?.to_string()];
                            while self.eat(',') {
                                names.push(self.word("a label")?.to_string());
                            }
                            self.expect(';')?;
                            list.push(Statement::Targets { label: w.to_string(), names });
                        }
                        Token::Dot("callprototype") => {
                            self.skip_to(';');
                            list.push(Statement::Prototype { label: w.to_string() });
                        }
                        _ => list.push(Statement::Label { name: w.to_string(), line }),
                    }
                }
                Token::Word(_) => list.push(self.instruction(None)?),
                Token::Dot("loc") => {
                    let directive = self.line();
                    self.next();
                    let file = self.uint()? as u32;
                    let line = self.uint()? as u32;
                    let column = if let Token::Number(_) = self.peek() { self.uint()? as u32 } else { 0 };
                    self.source = SourceLine { file, line, column, directive };
                    if self.peek() == Token::Punct(',') {
                        self.skip_line();
                    }
                }
                Token::Dot("pragma") => self.skip_to(';'),
                Token::Dot("reg") => self.registers(&mut list)?,
                Token::Dot(space) if Space::parse(space).is_some() => {
                    let mut vars = Vec::new();
                    self.variables(&mut vars)?;
                    list.extend(vars.into_iter().map(Statement::Variable));
                }
                _ => return self.error(format!("expected a statement, found {}", self.found())),
            }
        }
    }

    fn registers(&mut self, list: &mut Vec<Statement>) -> Result<()> {
        let line = self.line();
        self.next();
        let Token::Dot(ty) = self.next() else {
            return self.error("expected a type");
        };
        // A vector register consists of its elements, each a register `name.x`.
        let (elements, ty) = match (ty, self.peek()) {
            ("v2", Token::Dot(of)) => (&["x", "y"][..], of),
            ("v4", Token::Dot(of)) => (&["x", "y", "z", "w"][..], of),
            _ => (&[][..], ty),
        };
        if !elements.is_empty() {
            self.next();
        }
        let ty = self.ty(ty)?;
        loop {
            let name = self.word("a register name")?.to_string();
            let count = if self.eat('<') {
                let n = self.uint()?;
                self.expect('>')?;
                if n > u64::from(MAX_REGISTERS) {
                    return self.error(format!("{n} registers exceed the limit of {MAX_REGISTERS} per declaration"));
                }
                Some(n as u32)
            } else {
                None
            };
            if elements.is_empty() {
                list.push(Statement::Register { ty, name, count, line });
            } else {
                let names =
                    count.map_or_else(|| vec![name.clone()], |n| (0..n).map(|n| format!("{name}{n}")).collect());
                for name in names {
                    let register =
                        |of: &&str| Statement::Register { ty, name: format!("{name}.{of}"), count: None, line };
                    list.extend(elements.iter().map(register));
                }
            }
            if !self.eat(',') {
                return self.expect(';');
            }
        }
    }

    fn instruction(&mut self, guard: Option<(String, bool)>) -> Result<Statement> {
        let line = self.line();
        let opcode = self.word("an opcode")?.to_string();
        let mut modifiers = Vec::new();
        while let Token::Dot(m) = self.peek() {
            self.next();
            modifiers.push(m.to_string());
        }
        let mut operands = Vec::new();
        while !self.eat(';') {
            if !operands.is_empty() {
                self.expect(',')?;
            }
            operands.push(self.operand()?);
        }
        let source = self.source;
        Ok(Statement::Instruction(Instruction { guard, opcode, modifiers, operands, line, source }))
    }

    fn operand(&mut self) -> Result<Operand> {
        self.nested(Self::operand_inner)
    }

    fn operand_inner(&mut self) -> Result<Operand> {
        let first = match self.peek() {
            Token::Punct('!') => {
                self.next();
                return Ok(Operand::Not(Box::new(self.operand()?)));
            }
            Token::Punct('{') => {
                self.next();
                Operand::Vector(self.list('}')?)
            }
            Token::Punct('(') if !matches!(self.peek2(), Token::Number(_) | Token::Punct('-' | '~')) => {
                self.next();
                return Ok(Operand::List(self.list(')')?));
            }
            Token::Punct('[') => {
                self.next();
                return self.address();
            }
            Token::Word("_") => {
                self.next();
                Operand::Discard
            }
            Token::Word(w) if w != "WARP_SZ" => {
                self.next();
                match self.peek() {
                    Token::Dot(c @ ("x" | "y" | "z" | "w" | "r" | "g" | "b" | "a")) => {
                        self.next();
                        Operand::Component(w.to_string(), c.chars().next().unwrap_or('x'))
                    }
                    // `symbol+offset` as a value (PTX ISA, "Addresses as Operands").
                    Token::Punct('+' | '-') => {
                        let offset = self.offset()?;
                        let base = Some(Box::new(Operand::Name(w.to_string())));
                        return Ok(Operand::Address { base, offset, extra: Vec::new() });
                    }
                    _ => Operand::Name(w.to_string()),
                }
            }
            _ => return self.literal(),
        };
        if self.eat('|') {
            let second = self.operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn list(&mut self, close: char) -> Result<Vec<Operand>> {
        let mut list = Vec::new();
        while !self.eat(close) {
            if !list.is_empty() {
                self.expect(',')?;
            }
            list.push(self.operand()?);
        }
        Ok(list)
    }

    /// Parses the offset of an address: nothing, or `+` and a constant expression (PTX ISA, "Addresses as Operands").
    fn offset(&mut self) -> Result<i64> {
        if self.peek() == Token::Punct('-') {
            return self.error("an offset must start with `+`; write `+-8` for 8 bytes before");
        }
        if self.eat('+') { Ok(self.constant()? as i64) } else { Ok(0) }
    }

    fn address(&mut self) -> Result<Operand> {
        let (base, offset) = match self.peek() {
            Token::Word(w) => {
                self.next();
                (Some(Box::new(Operand::Name(w.to_string()))), self.offset()?)
            }
            _ => (None, self.constant()? as i64),
        };
        let mut extra = Vec::new();
        while self.eat(',') {
            extra.push(self.operand()?);
        }
        self.expect(']')?;
        Ok(Operand::Address { base, offset, extra })
    }
}

/// A numeric literal (PTX ISA, "Integer Constants", "Floating-Point Constants").
fn number(text: &str) -> Option<Operand> {
    if let Some(hex) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return (hex.len() == 8).then(|| u32::from_str_radix(hex, 16).ok().map(Operand::F32)).flatten();
    }
    if let Some(hex) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return (hex.len() == 16)
            .then(|| u64::from_str_radix(hex, 16).ok().map(|b| Operand::F64(f64::from_bits(b))))
            .flatten();
    }
    let hex = text.starts_with("0x") || text.starts_with("0X");
    if !hex && text.contains(['.', 'e', 'E']) {
        return text.parse().ok().map(Operand::F64);
    }
    integer(text).map(Operand::Int)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusual_forms_parse() {
        let text = r#"
.version 8.7
.target sm_100a, debug
.address_size 64
.file 1 "kernel.rs"
.extern .shared .align 16 .b8 smem[];
.global .align 4 .u32 table[2][2] = {{1, 2}, {3, 0x4}};
.visible .entry k(.param .u64 .ptr .global .align 16 p0, .param .align 64 .b8 map[128])
.maxntid 128, 1, 1
.minnctapersm 1
{
  .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b128 %q;
  .loc 1 12 3
  { .reg .b32 t; mov.b32 t, %tid.x; @!%p1 add.s32 %r1, t, -(1<<2); }
  elect.sync _|%p1, 0xffffffff;
  st.shared.v2.b32[smem+16],{%r1, %r2};
  cp.async.bulk.tensor.2d.shared::cta.global [smem], [map, {%r1, %r2}], [%r3];
  ld.param.b32 %r4, [%r5+-8];
  ld.param.b32 %r4, [%r5+2+2*(1<<3)];
  mov.f32 %r5, 0f3F800000;
$L1: brx.idx %r1, $T;
$T: .branchtargets $L1, $L2;
$L2: ret;
}
.section .debug_abbrev { .b8 1 .b8 2 }
"#;
        let ast = parse(text).unwrap();
        assert_eq!(ast.target, "sm_100a");
        assert_eq!(ast.variables[1].bytes, 16);
        assert_eq!(ast.functions[0].limits.max_threads, Some(128));
        assert_eq!(ast.functions[0].params.len(), 2);
    }

    #[test]
    fn kernel_parameters_are_limited_to_32764_bytes() {
        let kernel = |bytes| format!(".version 8.7\n.target sm_90a\n.entry k(.param .b8 p[{bytes}]) {{ ret; }}");
        assert_eq!(parse(&kernel(32_764)).unwrap().functions[0].params.len(), 1);
        assert!(parse(&kernel(32_765)).unwrap_err().message.contains("at most 32764"));
    }

    #[test]
    fn invalid_text_gives_an_error_with_its_line() {
        assert_eq!(parse("").unwrap_err().line, 1);
        let bodies = [
            "add.s32 %r1 %r2;",
            "mov.u32 %r1, %r2;;",
            "ld.shared.u32 %r1, [%r2-4];",
            "mov.u32 %r1, tile-4;",
            "ld.shared.u32 %r1, [%r2+4+%r3];",
        ];
        for body in bodies {
            let text = format!(".version 8.0\n.target sm_80\n.entry k() {{ {body} }}");
            assert_eq!(parse(&text).unwrap_err().line, 3, "{body}");
        }
        let deep = format!(".version 8.0\n.target sm_80\n.func f {{ {}", "{".repeat(100_000));
        assert!(parse(&deep).unwrap_err().message.contains("deep"));
    }
}
