//! Cost of an instruction in a warp scheduler and its pipes. The cost comes from the machine code if it is available
//! ([`super::sass`]). Otherwise each PTX instruction counts as one machine instruction.

/// Cost of a PTX instruction, in cycles of a warp scheduler (a quarter of an SM).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Issue slots: number of machine instructions.
    pub slots: u16,
    /// Cycles until the warp's next instruction can issue.
    pub stall: u16,
    /// Cycles of the integer and logic pipe: 16 lanes per cycle.
    pub alu: u16,
    /// Cycles of the multiply-add pipe: 32 lanes per cycle, 16 for integers.
    pub fma: u16,
    /// Cycles of the pipe for special functions and conversions: 4 lanes per cycle.
    pub special: u16,
    /// Instructions for the memory pipe, which all quarters share.
    pub memory: u16,
}

/// A pipe of a quarter of an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pipe {
    Alu,
    Fma,
    /// Integer products, also used for moves and shifts.
    Multiply,
    Special,
    Memory,
    /// Uniform instructions, branches, and other instructions that only take a slot.
    Slot,
}

impl Cost {
    /// Cost of one machine instruction.
    fn of(pipe: Pipe, stall: u16) -> Cost {
        let one = Cost { slots: 1, stall, ..Cost::default() };
        match pipe {
            Pipe::Alu => Cost { alu: 2, ..one },
            Pipe::Fma => Cost { fma: 1, ..one },
            Pipe::Multiply => Cost { fma: 2, ..one },
            Pipe::Special => Cost { special: 8, ..one },
            Pipe::Memory => Cost { memory: 1, ..one },
            Pipe::Slot => one,
        }
    }

    /// Cost of both, one after the other.
    pub fn and(self, o: Cost) -> Cost {
        Cost {
            slots: self.slots + o.slots,
            stall: self.stall + o.stall,
            alu: self.alu + o.alu,
            fma: self.fma + o.fma,
            special: self.special + o.special,
            memory: self.memory + o.memory,
        }
    }

    /// Divides the cost by a number, rounded up.
    pub fn divided(self, by: u16) -> Cost {
        let part = |n: u16| n.div_ceil(by);
        Cost {
            slots: part(self.slots),
            stall: part(self.stall),
            alu: part(self.alu),
            fma: part(self.fma),
            special: part(self.special),
            memory: part(self.memory),
        }
    }

    /// Subtracts a part of the cost.
    pub fn less(self, part: Cost) -> Cost {
        Cost {
            slots: self.slots - part.slots,
            stall: self.stall - part.stall,
            alu: self.alu - part.alu,
            fma: self.fma - part.fma,
            special: self.special - part.special,
            memory: self.memory - part.memory,
        }
    }

    /// Cost of a machine instruction, given its name as printed by nvdisasm and its stall count.
    ///
    /// Rates: CUDA C++ Programming Guide, "Arithmetic Instructions", compute capability 9.0 and 10.0.
    pub fn of_machine(name: &str, stall: u16) -> Cost {
        let base = name.split('.').next().unwrap_or(name);
        let pipe = match base {
            "LOP3" | "SHF" | "PRMT" | "IADD3" | "VIADD" | "ISETP" | "LEA" | "SEL" | "PLOP3" | "SGXT" | "VIMNMX"
            | "IMNMX" | "VIADDMNMX" | "FSETP" | "FSEL" | "FMNMX" | "MOV" | "CS2R" | "P2R" | "R2P" | "VOTE" | "BMSK"
            | "LOP" | "F2FP" | "HSETP2" | "IABS" | "VABSDIFF" => Pipe::Alu,
            "FMUL" | "FADD" | "FFMA" | "HADD2" | "HFMA2" | "FMUL2" | "FADD2" | "FFMA2" => Pipe::Fma,
            // An H200 issues one HMUL2 in two cycles (benches/probes).
            "IMAD" | "IDP" | "HMUL2" => Pipe::Multiply,
            "MUFU" | "F2F" | "F2I" | "I2F" | "I2FP" | "POPC" | "FLO" | "BREV" | "FRND" => Pipe::Special,
            "LDS" | "STS" | "LDG" | "STG" | "LD" | "ST" | "LDSM" | "STSM" | "ATOM" | "ATOMS" | "ATOMG" | "RED"
            | "REDG" | "LDL" | "STL" | "SHFL" | "LDC" | "LDTM" | "STTM" | "LDGSTS" => Pipe::Memory,
            _ => Pipe::Slot,
        };
        Cost::of(pipe, stall.max(1))
    }

    /// Cost of a PTX instruction by its full name, if no machine code is available.
    pub fn of_ptx(name: &str, stall: u16) -> Cost {
        let mut parts = name.split('.');
        let opcode = parts.next().unwrap_or(name);
        let float =
            name.ends_with("f32") || name.ends_with("f16") || name.ends_with("f16x2") || name.ends_with("bf16x2");
        let wide = name.ends_with("64");
        let one = |pipe| Cost::of(pipe, stall);
        let cost = match opcode {
            // ptxas removes most of these instructions.
            "mov" | "cvta" | "isspacep" => return Cost::default(),
            "ret" | "exit" | "bra" | "brx" | "call" => one(Pipe::Slot),
            "add" | "sub" | "mul" | "fma" if float => one(Pipe::Fma),
            "mul" | "mad" => one(Pipe::Multiply),
            "ex2" | "rcp" | "rsqrt" | "sqrt" | "lg2" | "sin" | "cos" | "tanh" | "popc" | "clz" | "brev" => {
                one(Pipe::Special)
            }
            "cvt" if float => one(Pipe::Alu),
            "cvt" => one(Pipe::Alu),
            "ld" if name.starts_with("ld.param") => return Cost::default(),
            "ld" | "st" | "atom" | "red" | "shfl" | "ldmatrix" | "stmatrix" => one(Pipe::Memory),
            "add" | "sub" | "and" | "or" | "xor" | "not" | "shl" | "shr" | "lop3" | "prmt" | "setp" | "selp"
            | "min" | "max" | "bfe" | "bfi" | "shf" | "neg" | "abs" => one(Pipe::Alu),
            _ => one(Pipe::Slot),
        };
        if wide && cost.alu > 0 { cost.and(cost) } else { cost }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_instructions_use_their_pipes() {
        assert_eq!(Cost::of_machine("LOP3.LUT", 4), Cost { slots: 1, stall: 4, alu: 2, ..Cost::default() });
        assert_eq!(Cost::of_machine("HMUL2.BF16", 1).fma, 2);
        assert_eq!(Cost::of_machine("IMAD.MOV.U32", 1).fma, 2);
        assert_eq!(Cost::of_machine("UMOV", 0), Cost { slots: 1, stall: 1, ..Cost::default() });
    }
}
