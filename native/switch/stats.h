// What a switch counts: X(enumerator, name, meaning), in C, because native/bpf/switch.bpf.c counts too. The
// first kNumSessionStats are data packets, counted for each session; the others are of the whole switch.
#pragma once

#define TORCHRELAY_SWITCH_STATS(X)                                                             \
  X(kReceived, "received", "data packets of members")                                          \
  X(kSent, "sent", "results sent")                                                             \
  X(kCompleted, "completed", "results that every worker was sent")                             \
  X(kAnsweredAgain, "answered_again", "results sent again because a worker asked again")       \
  X(kDuplicates, "duplicates", "packets sent again while other workers' packets were missing") \
  X(kStale, "stale", "packets older than the newest of their slot")                            \
  X(kForwarded, "forwarded", "sums of a rack's workers that went up, again ones included")     \
  X(kRejected, "rejected", "packets of a wrong size or for a slot that does not exist")        \
  X(kMalformed, "malformed", "datagrams neither data nor control, or with a wrong checksum")   \
  X(kStrangers, "strangers", "data packets whose sender is in no session")                     \
  X(kControl, "control", "control messages")                                                   \
  X(kControlDropped, "control_dropped", "control messages beyond what is kept")                \
  X(kDroppedIngress, "dropped_ingress", "packets dropped by the ingress probability")          \
  X(kDroppedEgress, "dropped_egress", "results dropped by the egress probability")             \
  X(kSocketLost, "socket_lost", "datagrams lost because the kernel's receive buffer was full") \
  X(kSendLost, "send_lost", "datagrams lost because the send buffer was full, or without route")

#ifdef __cplusplus
namespace torchrelay::switchml {
#endif

#define TORCHRELAY_SWITCH_STAT_ENUMERATOR(enumerator, name, meaning) enumerator,
enum SwitchStat { TORCHRELAY_SWITCH_STATS(TORCHRELAY_SWITCH_STAT_ENUMERATOR) kNumSwitchStats };
enum { kNumSessionStats = kRejected + 1 };

#ifdef __cplusplus
}  // namespace torchrelay::switchml
#endif
