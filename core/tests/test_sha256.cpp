#include <string>
#include <vector>

#include "../sha256.hpp"
#include "check.hpp"

using namespace kvferry;

static std::span<const std::uint8_t> bytes(const std::string& text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

static std::string hex(const Digest& digest) {
  std::string out;
  char two[3];
  for (const std::uint8_t byte : digest) {
    std::snprintf(two, sizeof two, "%02x", byte);
    out += two;
  }
  return out;
}

static void the_examples_of_the_standard_come_out() {  // FIPS 180-4 example values
  CHECK(hex(sha256(bytes(""))) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256(bytes("abc"))) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256(bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256(bytes(std::string(1'000'000, 'a')))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

static void hmac_of_rfc_4231_comes_out() {
  CHECK(hex(hmac_sha256(bytes(std::string(20, '\x0b')), bytes("Hi There"))) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256(bytes("Jefe"), bytes("what do ya want for nothing?"))) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(bytes(std::string(131, '\xaa')),
                        bytes("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

static void digests_are_compared_whole() {
  Digest a = sha256(bytes("a")), b = a;
  CHECK(equal_in_constant_time(a, b));
  b[31] ^= 1;
  CHECK(!equal_in_constant_time(a, b));
  CHECK(!equal_in_constant_time(a, std::span(b).first(31)));
}

int main() {
  the_examples_of_the_standard_come_out();
  hmac_of_rfc_4231_comes_out();
  digests_are_compared_whole();
  return TEST_RESULT();
}
