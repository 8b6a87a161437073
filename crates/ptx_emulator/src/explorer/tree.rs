//! The tree of all orders, walked depth first with dynamic partial-order reduction.
//!
//! Each run of the launch is one path. Two steps depend on each other if their footprints conflict. Steps that do not
//! may be exchanged, and of the orders that follow from each other by such exchanges one is enough. The reduction is
//! source-DPOR with sleep sets (Abdulla, Aronis, Jonsson, Sagonas: "Optimal Dynamic Partial Order Reduction", POPL 2014,
//! algorithm 1), after Flanagan and Godefroid (POPL 2005): for each pair of steps that depend on each other and could
//! come in the other order, the place of the first one gets another choice that leads there. Steps here can also
//! disable each other; then the agent that a step disables becomes a choice at the step's place.
//!
//! The bound of preemptions follows Musuvathi and Qadeer, "Iterative Context Bounding" (PLDI 2007). With a bound, the
//! reduction may leave out orders within the bound (Coons, Musuvathi, McKinley, OOPSLA 2013).

use std::collections::{BTreeMap, BTreeSet};

use crate::config::order::{Agent, Order};
use crate::machine::footprint::{Dependence, Footprint};

/// Chooses the agent of each step.
pub trait Guide {
    /// The next agent, one of `enabled`. `None`: the run is given up.
    fn choose(&mut self, enabled: &[Agent]) -> Option<Agent>;

    /// Tells what the chosen step touched, and which agents can go on behind it.
    fn stepped(&mut self, footprint: Footprint, enabled: &[Agent]);
}

/// The agent that goes on by itself: the last warp, another warp, or the oldest operation.
pub fn default_choice(last: Option<Agent>, among: &[Agent]) -> Option<Agent> {
    last.filter(|last| among.contains(last)).or_else(|| among.first().copied())
}

/// Whether a step of `next` takes the turn of the warp `last`, which could go on.
pub fn preempts(last: Option<Agent>, next: Agent, enabled: &[Agent]) -> bool {
    matches!(next, Agent::Warp { .. }) && last.is_some_and(|last| last != next && enabled.contains(&last))
}

/// The last warp of a sequence of agents behind one more step.
pub fn last_warp(last: Option<Agent>, next: Agent) -> Option<Agent> {
    if matches!(next, Agent::Warp { .. }) { Some(next) } else { last }
}

/// A place in the current path, with the step that the path takes there.
struct Node {
    enabled: Vec<Agent>,
    chosen: Agent,
    footprint: Footprint,
    /// Number of steps of each agent that come before the step or are the step itself, by happens-before.
    clock: Vec<u32>,
    /// Number of the step among its agent's steps.
    number: u32,
    /// Choices that must be explored here.
    needed: BTreeSet<Agent>,
    /// Choices that have been explored here, with their footprints.
    done: Vec<(Agent, Footprint)>,
    /// Choices whose orders have been explored elsewhere.
    sleep: Vec<(Agent, Footprint)>,
    /// Last warp before the step, and number of preemptions up to the step.
    last: Option<Agent>,
    preemptions: u32,
}

/// The tree, by its current path.
pub struct Tree {
    nodes: Vec<Node>,
    /// Number of steps of the current run so far.
    depth: usize,
    /// Dense numbers of agents.
    numbers: BTreeMap<Agent, usize>,
    reduction: bool,
    most_preemptions: u32,
    /// Whether the bound of preemptions has left out a choice.
    pub bounded: bool,
}

impl Tree {
    pub fn new(reduction: bool, preemptions: Option<u32>) -> Tree {
        Tree {
            nodes: Vec::new(),
            depth: 0,
            numbers: BTreeMap::new(),
            reduction,
            most_preemptions: preemptions.unwrap_or(u32::MAX),
            bounded: false,
        }
    }

    /// The current path.
    pub fn order(&self) -> Order {
        Order(self.nodes[..self.depth].iter().map(|node| node.chosen).collect())
    }

    /// Number of steps of the current path.
    pub fn steps(&self) -> usize {
        self.depth
    }

    /// Turns to the next path. Returns `false` if there is none.
    pub fn turn(&mut self) -> bool {
        self.depth = 0;
        while let Some(node) = self.nodes.last_mut() {
            let footprint = std::mem::take(&mut node.footprint);
            node.done.push((node.chosen, footprint));
            let before = node.preemptions - u32::from(preempts(node.last, node.chosen, &node.enabled));
            let left = |agent: &&Agent| {
                let among = |list: &[(Agent, Footprint)]| list.iter().any(|(other, _)| other == *agent);
                !among(&node.done) && !among(&node.sleep)
            };
            let cost = |agent: Agent| before + u32::from(preempts(node.last, agent, &node.enabled));
            let left: Vec<Agent> = node.needed.iter().filter(left).copied().collect();
            let next = left.iter().copied().find(|&agent| cost(agent) <= self.most_preemptions);
            self.bounded |= left.iter().any(|&agent| cost(agent) > self.most_preemptions);
            if let Some(next) = next {
                node.preemptions = cost(next);
                node.chosen = next;
                return true;
            }
            self.nodes.pop();
        }
        false
    }

    /// Returns the choices that sleep behind the last step. They slept or were explored before this step, and do not depend
    /// on it.
    fn sleeping(&self) -> Vec<(Agent, Footprint)> {
        let Some(last) = self.nodes.last().filter(|_| self.reduction) else { return Vec::new() };
        let independent = |step: &Footprint| step.depends_on(&last.footprint) == Dependence::None;
        let all = last.sleep.iter().chain(&last.done);
        all.filter(|(agent, step)| *agent != last.chosen && independent(step)).cloned().collect()
    }

    /// Whether the step at `before` happens before the step with this clock.
    fn precedes(&self, before: usize, clock: &[u32]) -> bool {
        let node = &self.nodes[before];
        clock.get(self.numbers[&node.chosen]).is_some_and(|&number| number >= node.number)
    }

    /// Clock of the last step, and the earlier steps that could come behind it.
    fn order_last(&self) -> (Vec<u32>, u32, Vec<usize>) {
        let last = self.nodes.len() - 1;
        let Node { chosen, footprint, .. } = &self.nodes[last];
        let mut clock = Vec::new();
        let (mut number, mut waker) = (1, None);
        for (at, node) in self.nodes[..last].iter().enumerate().rev() {
            if node.chosen == *chosen {
                (clock, number) = (node.clock.clone(), node.number + 1);
                break;
            }
            if waker.is_none() && !node.enabled.contains(chosen) {
                waker = Some(at);
            }
        }
        // A wait for a parity may also end two phases early, unless the agent knows that the phase in between is over.
        let early = |&at: &usize| {
            let node = &self.nodes[at];
            node.chosen != *chosen && !self.precedes(at, &clock) && footprint.could_have_ended_before(&node.footprint)
        };
        let mut races: Vec<usize> = (0..last).filter(early).collect();
        if let Some(waker) = waker {
            join(&mut clock, &self.nodes[waker].clock);
        }
        for (at, node) in self.nodes[..last].iter().enumerate().rev() {
            if node.chosen == *chosen || self.precedes(at, &clock) {
                continue;
            }
            let dependence = footprint.depends_on(&node.footprint);
            if dependence == Dependence::Race {
                races.push(at);
            }
            if dependence != Dependence::None {
                join(&mut clock, &node.clock);
            }
        }
        (clock, number, races)
    }

    /// Makes sure that an order is explored in which the last step comes before the step at `first`.
    fn reverse(&mut self, first: usize) {
        let last = self.nodes.len() - 1;
        let independent = |at: usize| at == last || !self.precedes(first, &self.nodes[at].clock);
        let moved: Vec<usize> = (first + 1..=last).filter(|&at| independent(at)).collect();
        let mut seen = BTreeSet::new();
        let mut initials = BTreeSet::new();
        for (n, &at) in moved.iter().enumerate() {
            let node = &self.nodes[at];
            if seen.insert(node.chosen) && !moved[..n].iter().any(|&before| self.precedes(before, &node.clock)) {
                initials.insert(node.chosen);
            }
        }
        let node = &mut self.nodes[first];
        if node.needed.is_disjoint(&initials) {
            match initials.into_iter().find(|agent| node.enabled.contains(agent)) {
                Some(agent) => _ = node.needed.insert(agent),
                None => node.needed.extend(&node.enabled),
            }
        }
    }
}

/// Replaces each number of `into` by the greater one of it and the number at the same place of `from`.
fn join(into: &mut Vec<u32>, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    into.iter_mut().zip(from).for_each(|(into, from)| *into = (*into).max(*from));
}

impl Guide for Tree {
    fn choose(&mut self, enabled: &[Agent]) -> Option<Agent> {
        if let Some(node) = self.nodes.get(self.depth) {
            return Some(node.chosen);
        }
        let sleep = self.sleeping();
        let awake: Vec<Agent> = enabled.iter().copied().filter(|a| !sleep.iter().any(|(b, _)| a == b)).collect();
        let (last, preemptions) = match self.nodes.last() {
            Some(node) => (last_warp(node.last, node.chosen), node.preemptions),
            None => (None, 0),
        };
        let chosen = default_choice(last, &awake)?;
        let preemptions = preemptions + u32::from(preempts(last, chosen, enabled));
        if preemptions > self.most_preemptions {
            self.bounded = true;
            return None;
        }
        let needed = if self.reduction { BTreeSet::from([chosen]) } else { enabled.iter().copied().collect() };
        let count = self.numbers.len();
        self.numbers.entry(chosen).or_insert(count);
        self.nodes.push(Node {
            enabled: enabled.to_vec(),
            chosen,
            footprint: Footprint::default(),
            clock: Vec::new(),
            number: 0,
            needed,
            done: Vec::new(),
            sleep,
            last,
            preemptions,
        });
        Some(chosen)
    }

    fn stepped(&mut self, footprint: Footprint, enabled: &[Agent]) {
        self.depth += 1;
        if self.depth < self.nodes.len() {
            // The path begins as the last one did, so nothing new is found here.
            return;
        }
        let Some(node) = self.nodes.last_mut() else { return };
        node.footprint = footprint;
        if !self.reduction {
            return;
        }
        let count = self.numbers.len();
        let chosen = node.chosen;
        let own = *self.numbers.entry(chosen).or_insert(count);
        let (mut clock, number, races) = self.order_last();
        join(&mut clock, &vec![0; own + 1]);
        clock[own] = number;
        if let Some(node) = self.nodes.last_mut() {
            (node.clock, node.number) = (clock, number);
            let disabled = node.enabled.iter().filter(|&&agent| agent != chosen && !enabled.contains(&agent));
            node.needed.extend(disabled);
        }
        for first in races {
            self.reverse(first);
        }
    }
}
