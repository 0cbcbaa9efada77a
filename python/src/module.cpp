// The extension module gannet._core: gannet/__init__.py and its neighbours are its only users.
#include "tensors.h"

namespace gannet_python {
namespace {

/// Errors of the library as gannet.Error's subclasses, with the same text.
void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const gannet::Error& e) {
    const char* name = "Error";
    switch (e.code()) {
      case gannet::ErrorCode::kInvalidArgument: name = "InvalidArgumentError"; break;
      case gannet::ErrorCode::kUnsupported: name = "UnsupportedError"; break;
      case gannet::ErrorCode::kOutOfMemory: name = "OutOfMemoryError"; break;
      case gannet::ErrorCode::kDevice: name = "DeviceError"; break;
      case gannet::ErrorCode::kCorruptFile: name = "CorruptFileError"; break;
    }
    const nb::object type = nb::module_::import_("gannet._errors").attr(name);
    PyErr_SetString(type.ptr(), e.what());
  } catch (const nb::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "an argument is not of the type that its documentation names");
  }
}

}  // namespace
}  // namespace gannet_python

NB_MODULE(_core, m) {
  nanobind::register_exception_translator(&gannet_python::translate, nullptr);
  gannet_python::bind_caches(m);
  gannet_python::bind_ops(m);
  gannet_python::bind_pools(m);
  gannet_python::bind_backend(m);
}
