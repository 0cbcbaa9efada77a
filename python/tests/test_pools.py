"""Pages, tables, pools, and pages that move."""

import numpy as np
import pytest

import gannet


def test_pages_are_counted():
    allocator = gannet.PageAllocator(8)
    first = allocator.acquire(3)
    assert first.ids == [1, 2, 3] and len(first) == 3 and allocator.num_used == 3
    shared = first.share(0, 2)
    first.clear()
    assert allocator.num_used == 2
    shared.append(allocator.acquire(1))
    assert allocator.num_used == 3
    del shared
    assert allocator.num_free == 7 and gannet.RESERVED_PAGE == 0
    assert gannet.pages_for(65) == 2 and gannet.pages_for(0) == 0


def test_tables_keep_unused_cells_zero():
    table = gannet.PageTable(2, 4)
    pages = gannet.PageAllocator(8).acquire(3)
    table.set_row(0, pages)
    table.append(1, [5])
    cells = np.asarray(table.cells)
    assert cells.tolist() == [[1, 2, 3, 0], [5, 0, 0, 0]] and table.num_pages(0) == 3
    table.set_row(0, [7])
    assert cells[0].tolist() == [7, 0, 0, 0]  # the same memory
    with pytest.raises(gannet.InvalidArgumentError):
        table.set_row(2, [1])


def test_a_layer_keeps_its_pool_alive():
    cache = gannet.LatentPool(1, 2, format="fp32", page_size=4).layer(0)
    pages = cache.pages
    assert pages.shape == (2, 4 * 2304) and pages.dtype == np.uint8 and (pages[0] == 0).all()
    pages[1] = 1
    del cache
    assert (pages[1] == 1).all()


def test_pages_travel():
    def pools():
        return gannet.LatentPool(3, 4, page_size=64), gannet.IndexKPool([1], 4)

    latent, index = pools()
    for layer in range(3):
        latent.layer(layer).pages[:] = np.arange(4, dtype=np.uint8)[:, None] + 10 * layer
    index.layer(1).pages[:] = np.arange(4, dtype=np.uint8)[:, None] + 100
    assert index.has_layer(1) and not index.has_layer(0)
    buffer = np.zeros(gannet.exported_bytes(latent, index, 2), np.uint8)
    gannet.export_pages(latent, index, [3, 1], buffer)
    assert len(buffer) == 2 * (3 * 64 * 1152 + 64 * 132) and buffer[0] == 3 and buffer[64 * 1152] == 1
    other, other_index = pools()
    gannet.import_pages(other, other_index, [1, 2], buffer)
    assert other.layer(2).pages[1][0] == 23 and other.layer(2).pages[2][0] == 21
    assert other_index.layer(1).pages[1][0] == 103
    gannet.copy_pages(other, other_index, [(1, 3)])
    assert other.layer(0).pages[3][0] == 3 and other_index.layer(1).pages[3][0] == 103
    with pytest.raises(gannet.InvalidArgumentError):
        gannet.export_pages(latent, index, [3, 1], buffer[:-1])
