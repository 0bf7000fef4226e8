//! Asynchronous events of a device (ibv_get_async_event(3)): a queue pair broke, a port went down, an
//! address changed, or the device itself is gone.

use rdma_core_sys::{
    IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_COMM_EST, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL,
    IBV_EVENT_GID_CHANGE, IBV_EVENT_LID_CHANGE, IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR,
    IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_QP_ACCESS_ERR,
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SM_CHANGE,
    IBV_EVENT_SQ_DRAINED, IBV_EVENT_SRQ_ERR, IBV_EVENT_SRQ_LIMIT_REACHED, IBV_EVENT_WQ_FATAL,
    ibv_async_event, ibv_event_type,
};

/// The subject of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum About {
    /// The queue pair of this number is unusable.
    BrokenQueuePair(u32),
    /// A completion queue or a shared receive queue is unusable.
    BrokenQueue,
    /// This port may have become active.
    PortUp(u8),
    /// This port's state or addresses have changed.
    Port(u8),
    /// The device is unusable.
    Device,
    /// An event that needs no action here.
    Nothing,
}

/// An asynchronous event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceEvent {
    /// The name in infiniband/verbs.h, without its prefix.
    pub(crate) name: &'static str,
    pub(crate) about: About,
}

/// The event, and the number of the user that made the object that it is of; 0: it is of none, or of an unknown one.
pub(super) fn read(event: &ibv_async_event) -> (DeviceEvent, usize) {
    let (name, about): (_, fn(&ibv_async_event) -> About) = kind(event.event_type);
    (DeviceEvent { name, about: about(event) }, user(event))
}

fn user(event: &ibv_async_event) -> usize {
    let of = event.element;
    // SAFETY: the type says what the event is of; the object cannot be destroyed before it is acknowledged.
    let mark = unsafe {
        match event.event_type {
            IBV_EVENT_CQ_ERR => of.cq.as_ref().map(|cq| cq.cq_context),
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                of.srq.as_ref().map(|srq| srq.srq_context)
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED => of.qp.as_ref().map(|qp| qp.qp_context),
            _ => None,
        }
    };
    mark.map_or(0, |mark| mark.addr())
}

/// The name of an event type, and the function that reads such an event.
fn kind(kind: ibv_event_type) -> (&'static str, fn(&ibv_async_event) -> About) {
    const NOTHING: fn(&ibv_async_event) -> About = |_| About::Nothing;
    const QUEUE: fn(&ibv_async_event) -> About = |_| About::BrokenQueue;
    match kind {
        IBV_EVENT_QP_FATAL => ("QP_FATAL", broken_queue_pair),
        IBV_EVENT_QP_REQ_ERR => ("QP_REQ_ERR", broken_queue_pair),
        IBV_EVENT_QP_ACCESS_ERR => ("QP_ACCESS_ERR", broken_queue_pair),
        IBV_EVENT_PATH_MIG_ERR => ("PATH_MIG_ERR", broken_queue_pair),
        IBV_EVENT_CQ_ERR => ("CQ_ERR", QUEUE),
        IBV_EVENT_SRQ_ERR => ("SRQ_ERR", QUEUE),
        IBV_EVENT_DEVICE_FATAL => ("DEVICE_FATAL", |_| About::Device),
        IBV_EVENT_PORT_ACTIVE => ("PORT_ACTIVE", |event| About::PortUp(port(event))),
        IBV_EVENT_PORT_ERR => ("PORT_ERR", |event| About::Port(port(event))),
        IBV_EVENT_LID_CHANGE => ("LID_CHANGE", |event| About::Port(port(event))),
        IBV_EVENT_PKEY_CHANGE => ("PKEY_CHANGE", |event| About::Port(port(event))),
        IBV_EVENT_GID_CHANGE => ("GID_CHANGE", |event| About::PortUp(port(event))),
        IBV_EVENT_SM_CHANGE => ("SM_CHANGE", NOTHING),
        IBV_EVENT_CLIENT_REREGISTER => ("CLIENT_REREGISTER", NOTHING),
        IBV_EVENT_COMM_EST => ("COMM_EST", NOTHING),
        IBV_EVENT_SQ_DRAINED => ("SQ_DRAINED", NOTHING),
        IBV_EVENT_PATH_MIG => ("PATH_MIG", NOTHING),
        IBV_EVENT_SRQ_LIMIT_REACHED => ("SRQ_LIMIT_REACHED", NOTHING),
        IBV_EVENT_QP_LAST_WQE_REACHED => ("QP_LAST_WQE_REACHED", NOTHING),
        IBV_EVENT_WQ_FATAL => ("WQ_FATAL", NOTHING),
        _ => ("of a kind that is not known here", NOTHING),
    }
}

fn broken_queue_pair(event: &ibv_async_event) -> About {
    // SAFETY: events of this type are about a queue pair, which cannot be destroyed before they are
    // acknowledged.
    let number = unsafe { event.element.qp.as_ref() }.map(|qp| qp.qp_num);
    number.map_or(About::Nothing, About::BrokenQueuePair)
}

fn port(event: &ibv_async_event) -> u8 {
    // SAFETY: events of this type are about a port.
    u8::try_from(unsafe { event.element.port_num }).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_named_and_of_something() {
        // SAFETY: all zeroes is a valid ibv_async_event.
        let mut raw: ibv_async_event = unsafe { std::mem::zeroed() };
        raw.element.port_num = 2;
        for (kind, name, about) in [
            (IBV_EVENT_PORT_ERR, "PORT_ERR", About::Port(2)),
            (IBV_EVENT_PORT_ACTIVE, "PORT_ACTIVE", About::PortUp(2)),
            (IBV_EVENT_DEVICE_FATAL, "DEVICE_FATAL", About::Device),
            (IBV_EVENT_SM_CHANGE, "SM_CHANGE", About::Nothing),
        ] {
            raw.event_type = kind;
            assert_eq!(read(&raw), (DeviceEvent { name, about }, 0));
        }
        // SAFETY: all zeroes is a valid ibv_qp.
        let mut qp: rdma_core_sys::ibv_qp = unsafe { std::mem::zeroed() };
        (qp.qp_num, qp.qp_context) = (17, std::ptr::without_provenance_mut(5));
        (raw.event_type, raw.element.qp) = (IBV_EVENT_QP_FATAL, &mut qp);
        let broken = DeviceEvent { name: "QP_FATAL", about: About::BrokenQueuePair(17) };
        assert_eq!(read(&raw), (broken, 5));
        let names: std::collections::HashSet<_> = (0..20).map(|number| kind(number).0).collect();
        assert_eq!(names.len(), 20, "each has its own");
    }
}
