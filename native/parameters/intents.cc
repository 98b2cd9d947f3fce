#include "parameters/intents.h"

#include <algorithm>
#include <cmath>

namespace torchrelay::parameters {
namespace {

constexpr double kCertainty = 0.9999;
constexpr double kCertaintyDeviations = 3.719016485455709;  // the normal quantile of kCertainty
constexpr double kDecay = 0.9;
constexpr double kNormalFrom = 1e6;
constexpr double kTailDeviations = 12;  // below this the Poisson distribution holds nothing that doubles show

// std::lgamma writes the global signgam, and channels run in threads of their own.
double log_gamma(double x) {
  int sign = 0;
  return lgamma_r(x, &sign);
}

}  // namespace

std::int64_t poisson_quantile(double mean, double probability) {
  if (mean <= 0) return 0;
  const double deviation = std::sqrt(mean);
  if (mean > kNormalFrom)
    return static_cast<std::int64_t>(std::ceil(mean + kCertaintyDeviations * deviation));
  double k = std::max(0.0, std::floor(mean - kTailDeviations * deviation));
  double mass = std::exp(k * std::log(mean) - mean - log_gamma(k + 1));
  const double last = mean + kTailDeviations * deviation + kTailDeviations;
  for (double sum = mass; sum < probability && k < last; sum += mass) mass *= mean / ++k;
  return static_cast<std::int64_t>(k);
}

std::int64_t TickEstimate::window(std::int64_t ticks) {
  if (ticks > 0) rate_ = kDecay * rate_ + (1 - kDecay) * static_cast<double>(ticks);
  const double expected = std::max(static_cast<double>(ticks), rate_);
  if (expected != computed_for_) {
    window_ = poisson_quantile(2 * expected, kCertainty);  // this round and the next
    computed_for_ = expected;
  }
  return window_;
}

void WorkerIntents::announce(std::int64_t start, std::int64_t end, std::vector<std::int64_t> keys) {
  std::ranges::sort(keys);
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  future_.emplace(start, Announced{end, std::move(keys)});
}

void WorkerIntents::round(std::int64_t clock, const Begin& begin, const Expire& expire) {
  const std::int64_t ticks = clock == INT64_MAX ? 0 : clock - last_clock_;
  last_clock_ = clock;
  const std::int64_t window = estimate_.window(ticks);
  const std::int64_t horizon = clock > INT64_MAX - window ? INT64_MAX : clock + window;
  while (!future_.empty() && future_.begin()->first <= horizon) {
    const std::int64_t start = std::max(clock, future_.begin()->first);
    Announced announced = std::move(future_.begin()->second);
    future_.erase(future_.begin());
    if (announced.end <= clock) continue;
    std::erase_if(announced.keys, [&](std::int64_t key) { return !begin(key, announced.end - start); });
    live_.emplace(announced.end, std::move(announced.keys));
  }
  while (!live_.empty() && live_.begin()->first <= clock) {
    for (const std::int64_t key : live_.begin()->second) expire(key);
    live_.erase(live_.begin());
  }
}

}  // namespace torchrelay::parameters
