//! The protocol without a device: engines over a simulated network, reproducible from one seed.
//!
//! [`property`] checks random operations against an oracle of the matching rules. The other files have one directed
//! test for each behaviour.

mod active_peers;
mod alone;
mod atomic;
mod collectives;
mod contexts;
mod dead_peers;
mod departures;
mod device_failures;
mod eager;
mod fixture;
mod hostile;
mod hostile_windows;
mod lanes;
mod limits;
mod many_peers;
mod matching;
mod multi_receive;
mod offers;
mod oracle;
mod property;
mod rendezvous;
mod rest;
mod rma;
mod rma_property;
mod rng;
mod sharing;
mod sim;
mod sim_share;
mod sim_stream;
mod sim_window;
mod staging;
mod windows;
