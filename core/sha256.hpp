// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proof of a shared secret in the hello. Not for payload.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry {

using Digest = std::array<std::uint8_t, 32>;
Digest sha256(std::span<const std::uint8_t> data);
Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> data);
bool equal_in_constant_time(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b) noexcept;

}  // namespace kvferry
