#pragma once

#include <functional>
#include <memory>
#include <mutex>

namespace dtorch::shm {

/// What a layer above keeps with the process at the other end, until that ends. Thread-safe.
class Keepsake {
 public:
  /// Made by the first call, with a lock held: `make` calls nothing of this layer.
  std::shared_ptr<void> Get(const std::function<std::shared_ptr<void>()>& make) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!kept_) kept_ = make();
    return kept_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<void> kept_;
};

}  // namespace dtorch::shm
