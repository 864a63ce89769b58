# find_package(kvferry): the target kvferry::llm_datadist, a library with the llm_datadist C++ API.
include(${CMAKE_CURRENT_LIST_DIR}/kvferryTargets.cmake)
