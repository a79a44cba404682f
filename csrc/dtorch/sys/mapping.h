#pragma once

#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <utility>

namespace dtorch {

/// Owns a shared, writable mapping of a range of a file. Move-only.
class Mapping {
 public:
  Mapping() = default;
  /// Empty, and errno set, if it fails.
  Mapping(int fd, uint64_t offset, size_t size) : size_(size) {
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                    static_cast<off_t>(offset));
    if (at == MAP_FAILED) return;
    data_ = static_cast<std::byte*>(at);
    madvise(data_, size, MADV_DONTDUMP);  // a core file of many sparse GiB helps nobody
  }
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      Unmap();
      data_ = std::exchange(other.data_, nullptr);
      size_ = other.size_;
    }
    return *this;
  }
  ~Mapping() { Unmap(); }

  explicit operator bool() const { return data_ != nullptr; }
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void Unmap() {
    if (data_) munmap(std::exchange(data_, nullptr), size_);
  }

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dtorch
