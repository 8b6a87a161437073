//! Counts the matrix operations between the request of a copy and its use. See [`Loads`](crate::Loads).

use crate::machine::mbarrier::MbarrierAt;
use crate::machine::state::Machine;
use crate::machine::warp::Warp;

impl Machine<'_> {
    /// Counts a matrix operation that a warp issues to the tensor cores of some CTAs.
    pub fn count_matrix_operation(&mut self, w: &Warp, ctas: &[u32], multiply_adds: u64) {
        for &cta in ctas {
            self.ctas[cta as usize].requests.matrix_operations += 1;
        }
        let role = &mut self.roles[w.role as usize];
        role.matrix_operations += 1;
        role.matrix_multiply_adds += multiply_adds;
    }

    /// Records the request of a copy that will signal an mbarrier.
    pub fn load_requested(&mut self, barrier: MbarrierAt) {
        let requests = &mut self.ctas[barrier.cta as usize].requests;
        requests.at.insert(barrier.offset, requests.matrix_operations);
    }

    /// Records that a warp found a phase of an mbarrier complete.
    pub fn phase_awaited(&mut self, w: &Warp, barrier: MbarrierAt) {
        let requests = &mut self.ctas[barrier.cta as usize].requests;
        if let Some(before) = requests.at.remove(&barrier.offset) {
            let meanwhile = requests.matrix_operations - before;
            let loads = &mut self.roles[w.role as usize].loads;
            loads.phases += 1;
            loads.overlapped += u64::from(meanwhile > 0);
            loads.matrix_operations += meanwhile;
        }
    }
}
