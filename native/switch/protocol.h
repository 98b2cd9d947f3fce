// The numbers of the switch's packets and messages, in C, because native/bpf/switch.bpf.c reads them too.
#pragma once

// Kinds of control messages, their second byte: X(enumerator, name, value).
#define TORCHRELAY_SWITCH_CONTROL_KINDS(X)                                                  \
  X(kJoin, JOIN, 1)                                                                         \
  X(kJoined, JOINED, 2)                                                                     \
  X(kRefused, REFUSED, 3)                /* and why, in UTF-8 */                            \
  X(kUnknownSession, UNKNOWN_SESSION, 4) /* the switch may have been restarted */           \
  X(kCoalesced, COALESCED, 5)            /* send single datagrams: several arrive as one */ \
  X(kLeave, LEAVE, 6)                    /* and the rank */                                 \
  X(kAskMissing, ASK_MISSING, 7)                                                            \
  X(kMissingRanks, MISSING, 8) /* and the workers that packets in progress wait for */      \
  X(kBusy, BUSY, 9)            /* the worker may join later; with the reason, in UTF-8 */   \
  X(kAlive, ALIVE, 10)         /* from a member that has nothing to send */

#ifdef __cplusplus
namespace torchrelay::switchml {
#endif

enum {
  kUdpPort = 0xBEE0,
  kNumUdpPorts = 16,  // a switch at kUdpPort takes so many, as SwitchML's does
  kHeaderBytes = 10,
  kMaxNumel = 256,
  kMaxSlots = 1 << 13,
  kDataType = 1,
  kControlType = 2,
  kSmallCode = 1,  // 64 values
  kLargeCode = 3,  // 256
  kSetBit = 1 << 15,
  kSlotBits = 0x3FFF,
  kXdpMaxWorkers = 64,  // of a session
  kXdpMaxPorts = 64,
};

#define TORCHRELAY_SWITCH_ENUMERATOR(enumerator, name, value) enumerator = value,
enum ControlKind { TORCHRELAY_SWITCH_CONTROL_KINDS(TORCHRELAY_SWITCH_ENUMERATOR) };

#ifdef __cplusplus
}  // namespace torchrelay::switchml
#endif
