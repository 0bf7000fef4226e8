/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What the udrv provider offers beyond libfabric's own interface: fi_udrv(7).
 * Made from src/ofi/ext.rs by scripts/header.
 */

#ifndef FI_EXT_UDRV_H
#define FI_EXT_UDRV_H

#include <stddef.h>
#include <stdint.h>
#include <rdma/fabric.h>
#include <rdma/fi_endpoint.h>

// Name of the operations of `struct fi_ops_udrv` for `fi_open_ops`.
#define FI_UDRV_OPS "udrv_ops"

// `fi_ep_attr.protocol` of udrv's endpoints, 0x75647276.
#define FI_PROTO_UDRV 1969517174

// What happened to a failed operation: `prov_errno` of its `struct fi_cq_err_entry`.
// `fi_cq_strerror` gives the sentence.
enum fi_udrv_cause {
    // The message is longer than the receive buffer: FI_ETRUNC.
    FI_UDRV_CAUSE_TRUNCATED = 1,
    // The operation was cancelled: FI_ECANCELED.
    FI_UDRV_CAUSE_CANCELLED = 2,
    // No matching message has arrived (FI_PEEK): FI_ENOMSG.
    FI_UDRV_CAUSE_NO_MESSAGE = 3,
    // The peer's process ended: FI_EHOSTUNREACH.
    FI_UDRV_CAUSE_PEER_DIED = 4,
    // The peer closed its endpoint: FI_ECONNRESET.
    FI_UDRV_CAUSE_PEER_CLOSED = 5,
    // The connection to the peer broke.
    FI_UDRV_CAUSE_LINK_BROKE = 6,
    // The peer cannot be reached.
    FI_UDRV_CAUSE_PEER_UNREACHABLE = 7,
    // The sender went away before the message was complete.
    FI_UDRV_CAUSE_SENDER_LOST = 8,
    // The sender's buffer cannot be read.
    FI_UDRV_CAUSE_SENDER_UNREADABLE = 9,
    // The receiver could not take the message.
    FI_UDRV_CAUSE_RECEIVER_REFUSED = 10,
    // The peer gave no sign of life for FI_UDRV_PEER_TIMEOUT seconds: FI_ETIMEDOUT.
    FI_UDRV_CAUSE_PEER_SILENT = 11,
    // The target of a one-sided operation has no region with this key: FI_EKEYREJECTED.
    FI_UDRV_CAUSE_KEY_REJECTED = 12,
    // The target's region does not reach so far, or does not allow this: FI_EACCES.
    FI_UDRV_CAUSE_ACCESS_DENIED = 13,
    // The target could not reach the initiator's buffer.
    FI_UDRV_CAUSE_TARGET_FAILED = 14,
    // The target is of a version that does not know this atomic operation: FI_EOPNOTSUPP.
    FI_UDRV_CAUSE_NO_ATOMICS = 15,
    // The buffer of the receive, or of the read, cannot be written: FI_EFAULT; FI_EIO if its device failed.
    FI_UDRV_CAUSE_BUFFER_UNWRITABLE = 16,
    // A triggered operation or deferred work could not be started when its counter came so far.
    FI_UDRV_CAUSE_NOT_STARTED = 20,
    // A member of the collective group went away or failed.
    FI_UDRV_CAUSE_MEMBER_GONE = 21,
    // The members of the group do not mean the same operation.
    FI_UDRV_CAUSE_MEMBERS_DISAGREE = 22,
};

// What an endpoint has done since it was enabled.
struct fi_udrv_counts {
    // Messages sent eagerly.
    uint64_t eager_sent;
    // Messages sent by rendezvous.
    uint64_t rendezvous_sent;
    // Messages that arrived before their receive was posted.
    uint64_t unexpected;
    // Bytes that this endpoint, as a receiver, read from its peers' buffers.
    uint64_t pulled_bytes;
    // Bytes that this endpoint, as a sender, wrote into its peers' buffers.
    uint64_t pushed_bytes;
    // Bytes of rendezvous messages that this endpoint sent as fragments.
    uint64_t fragment_bytes;
    // Packets that nothing could be done with.
    uint64_t dropped;
    // Packets with bytes of long messages that came unasked, and had no place left.
    uint64_t surplus;
    // Bytes of rendezvous messages that this endpoint sent by stream.
    uint64_t stream_bytes;
    // Messages whose stream or windows failed while this endpoint received them, and that went on as
    // fragments.
    uint64_t resumed;
    // Bytes of rendezvous messages that this endpoint wrote into windows of its peers (RDMA).
    uint64_t window_bytes;
    // Windows that this endpoint had lent to peers when their connection ended.
    uint64_t windows_lost;
    // Messages that this endpoint could not write into the windows it was lent.
    uint64_t declined;
    // Bytes that this endpoint, as a sender, wrote of messages that it and their receiver copied
    // together: the receiver does not count them.
    uint64_t assisted_bytes;
    // Bytes that this endpoint read from and wrote to memory regions of processes of this node by
    // itself: their owners do not count them.
    uint64_t reached_bytes;
    // Bytes that this endpoint, as a receiver, read of messages while their senders wrote the others
    // into its windows (RDMA).
    uint64_t read_bytes;
};

// Operations on an endpoint, through
// `fi_open_ops(&ep->fid, FI_UDRV_OPS, 0, (void **)&ops, NULL)`. Later versions append members: look
// at `size` before calling one that this version does not have.
struct fi_ops_udrv {
    // Bytes of this structure.
    size_t size;
    // Writes the counts of `ep` to `counts`, which has `size` bytes. A shorter structure gets the
    // members that fit, the rest of a longer one is zeroed. Returns 0, -FI_EINVAL for null pointers
    // or -FI_EOPBADSTATE before `fi_enable`.
    int (*counts)(struct fid_ep *ep, struct fi_udrv_counts *counts, size_t size);
    // Writes to `text`, which has `size` bytes, which protocol messages between `ep` and `peer` take
    // at which size, as they are connected now: one line a range of sizes, of six fields that tabs
    // separate: what carries them; the shortest, bytes; the longest, or nothing; the protocol; the
    // variable that moves the longest (the shortest, if there is no longest), or nothing; and why. Ends
    // in a zero byte, and is cut where there is no room. Returns the bytes that all of it has, without the zero; -FI_EINVAL for null pointers or
    // an address that is not in the address vector; -FI_EOPBADSTATE before `fi_enable`; -FI_EAGAIN
    // while it is being connected.
    int (*thresholds)(struct fid_ep *ep, fi_addr_t peer, char *text, size_t size);
};

#endif  /* FI_EXT_UDRV_H */
