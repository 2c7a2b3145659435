//! What a collective is: its operation, who takes part, and how its arrays lie in memory.

/// A collective of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collective {
    /// What is done.
    pub op: Op,
    /// Groups that do it independently, each in the order of ranks. A member is a device of the program,
    /// counted as replica × partitions + partition; every member is in exactly one group.
    pub groups: Vec<Vec<u32>>,
    /// The operands, in order. For [`Op::AllToAll`] with `tuple` there is one per rank.
    pub arrays: Vec<Array>,
}

impl Collective {
    /// The group of a member and its rank there; `None` for a number that is no member.
    pub fn place(&self, member: u32) -> Option<(&[u32], usize)> {
        self.groups.iter().find_map(|group| group.iter().position(|&m| m == member).map(|rank| (group.as_slice(), rank)))
    }

    /// Bytes of an operand and of a result in a group of so many ranks; `None` if they overflow.
    pub fn sizes(&self, array: &Array, ranks: usize) -> Option<(usize, usize)> {
        let (outer, chunk) = (usize::try_from(array.outer).ok()?, usize::try_from(array.chunk).ok()?);
        // Also where there is no run, so that no product of two of the three overflows later.
        chunk.checked_mul(ranks)?;
        let one = outer.checked_mul(chunk)?;
        let all = one.checked_mul(ranks)?;
        Some(match self.op {
            Op::AllGather => (one, all),
            Op::ReduceScatter(_) => (all, one),
            Op::AllToAll { tuple: false } => (all, all),
            _ => (one, one),
        })
    }
}

/// An operation. `G` is the number of ranks of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Every rank gets the reduction of all operands.
    AllReduce(Reduce),
    /// Operand `[outer][chunk]`, result `[outer][G][chunk]`: every rank gets all operands.
    AllGather,
    /// Operand `[outer][G][chunk]`, result `[outer][chunk]`: a rank gets the reduction of its chunks.
    ReduceScatter(Reduce),
    /// Rank `r` gets what the others have for it, in the order of ranks.
    AllToAll {
        /// If set, `G` operands and `G` results of `[outer][chunk]` each; else one operand and one result
        /// of `[outer][G][chunk]`.
        tuple: bool,
    },
    /// The second member of each pair gets the operand of the first; who is no second gets zeros.
    /// There is one group, of all members.
    Permute(Vec<(u32, u32)>),
    /// Every rank gets the operand of rank 0.
    Broadcast,
}

/// How two values become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Sum; integers wrap; `or` of truth values.
    Add,
    /// Product; integers wrap; `and` of truth values.
    Multiply,
    /// The lesser.
    Min,
    /// The greater.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
}

impl Reduce {
    pub(crate) const ALL: [(Reduce, &'static str, &'static str); 7] = [
        (Reduce::Add, "add", "add"),
        (Reduce::Multiply, "multiply", "mul"),
        (Reduce::Min, "minimum", "min"),
        (Reduce::Max, "maximum", "max"),
        (Reduce::And, "and", "and"),
        (Reduce::Or, "or", "or"),
        (Reduce::Xor, "xor", "xor"),
    ];

    /// The reduction that an HLO opcode does.
    pub(crate) fn from_opcode(opcode: &str) -> Option<Reduce> {
        Self::ALL.iter().find(|(_, name, _)| *name == opcode).map(|(reduce, _, _)| *reduce)
    }

    /// Whether values of this type can be reduced so.
    pub fn takes(self, element: Element) -> bool {
        use Element as E;
        match element {
            E::Pred | E::S8 | E::S16 | E::S32 | E::S64 | E::U8 | E::U16 | E::U32 | E::U64 => true,
            E::F16 | E::Bf16 | E::F32 | E::F64 => !matches!(self, Reduce::And | Reduce::Or | Reduce::Xor),
            E::C64 | E::C128 => matches!(self, Reduce::Add | Reduce::Multiply),
            E::Other(_) => false,
        }
    }
}

/// An operand of a collective and the result that goes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Array {
    /// Element type.
    pub element: Element,
    /// Number of runs of chunks in memory, one behind the other; see [`Op`]. 1 unless a dimension is gathered,
    /// scattered or exchanged that is not the most major one.
    pub outer: u64,
    /// Bytes of a chunk.
    pub chunk: u64,
}

/// Element type, named as XLA names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Element {
    Pred,
    S8,
    S16,
    S32,
    S64,
    U8,
    U16,
    U32,
    U64,
    F16,
    Bf16,
    F32,
    F64,
    C64,
    C128,
    /// A type that can be moved but not reduced, by its `PrimitiveType` number.
    Other(u32),
}

impl Element {
    /// Type, `PrimitiveType` number, name, bits.
    const TABLE: [(Element, u32, &'static str, u64); 15] = [
        (Element::Pred, 1, "pred", 8),
        (Element::S8, 2, "s8", 8),
        (Element::S16, 3, "s16", 16),
        (Element::S32, 4, "s32", 32),
        (Element::S64, 5, "s64", 64),
        (Element::U8, 6, "u8", 8),
        (Element::U16, 7, "u16", 16),
        (Element::U32, 8, "u32", 32),
        (Element::U64, 9, "u64", 64),
        (Element::F16, 10, "f16", 16),
        (Element::F32, 11, "f32", 32),
        (Element::F64, 12, "f64", 64),
        (Element::C64, 15, "c64", 64),
        (Element::Bf16, 16, "bf16", 16),
        (Element::C128, 18, "c128", 128),
    ];

    /// The type of a `PrimitiveType` number.
    pub(crate) fn from_code(code: u32) -> Element {
        Self::TABLE.iter().find(|(_, c, _, _)| *c == code).map_or(Element::Other(code), |(e, _, _, _)| *e)
    }

    /// Bits of an element in memory unless its layout says otherwise. The types of less than a byte fill one.
    /// `None` for what is no array type or not known.
    pub(crate) fn bits(self) -> Option<u64> {
        match self {
            // F8 in its variants; S4, U4, S2, U2, S1, U1; F4 and F6.
            Element::Other(19 | 20 | 23..=25 | 28 | 29 | 33 | 21 | 22 | 26 | 27 | 30..=32 | 35 | 36) => Some(8),
            Element::Other(_) => None,
            known => Self::TABLE.iter().find(|(e, _, _, _)| *e == known).map(|(_, _, _, bits)| *bits),
        }
    }

    pub(crate) fn name(self) -> String {
        match self {
            Element::Other(code) => format!("t{code}"),
            known => Self::TABLE.iter().find(|(e, _, _, _)| *e == known).map_or_else(String::new, |(_, _, name, _)| (*name).to_owned()),
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Element> {
        let known = Self::TABLE.iter().find(|(_, _, n, _)| *n == name).map(|(e, _, _, _)| *e);
        known.or_else(|| name.strip_prefix('t')?.parse().ok().map(Element::from_code))
    }
}
