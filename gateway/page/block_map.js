/** The pool of KV blocks as squares. Draws only what has changed, so that tens of thousands of blocks cost little. */

export const RESERVED = 0, FREE = 1, CACHED = 2, OWNED = 3, SHARED = 4, IN_TRANSFER = 5;
export const STATE_NAMES = ["reserved", "free", "cached", "owned", "shared", "in transfer"];

const MIN_CELL = 3;
const MAX_CELL = 24;
const MAX_HEIGHT = 560;
const GOLDEN_ANGLE = 137.508;

/** A sequence's colour: neighbours in number are far apart in hue. */
export function sequenceColour(id, isDark, alpha = 1) {
  const hue = (id * GOLDEN_ANGLE + 205) % 360;
  return `hsl(${hue.toFixed(1)} ${isDark ? 62 : 58}% ${isDark ? 63 : 47}% / ${alpha})`;
}

export class BlockMap {
  /** onPoint(block or -1, x, y in the canvas): what the mouse or the keyboard points at. */
  constructor(canvas, onPoint) {
    this._canvas = canvas;
    this._context = canvas.getContext("2d");
    this._onPoint = onPoint;
    this._states = new Uint8Array(0);
    this._owners = new Map(); // block → [[sequence, index in its table], …]
    this._drawn = []; // per block, what it looks like
    this._byState = false;
    this._lit = null; // id of the sequence that is shown, the others faded
    this._pointed = -1;
    this._blockSize = 16;
    this._cell = 0;
    canvas.addEventListener("mousemove", ({ offsetX, offsetY }) => this._point(this._at(offsetX, offsetY)));
    canvas.addEventListener("mouseleave", () => this._point(-1));
    canvas.addEventListener("blur", () => this._point(-1));
    canvas.addEventListener("keydown", (event) => this._onKey(event));
    new ResizeObserver(() => this.redraw()).observe(canvas.parentElement);
    addEventListener("themechange", () => this.redraw());
  }

  /** states: one byte per block, block 0 first. sequences: each { id, table: Int32Array, numComputed, … }. */
  update(states, sequences, blockSize) {
    const isResized = states.length !== this._states.length;
    this._states = states;
    this._blockSize = blockSize;
    this._owners = new Map();
    for (const sequence of sequences) {
      sequence.table.forEach((block, index) => {
        const owners = this._owners.get(block);
        if (owners) owners.push([sequence, index]);
        else this._owners.set(block, [[sequence, index]]);
      });
    }
    if (isResized) this.redraw();
    else this._draw();
    if (this._pointed >= 0) this._tell();
  }

  set byState(byState) {
    this._byState = byState;
    this.redraw();
  }

  /** Show the blocks of one sequence, and fade the rest; null: all. */
  set lit(id) {
    if (id === this._lit) return;
    this._lit = id;
    this._draw();
  }

  stateOf(block) {
    return this._states[block];
  }

  ownersOf(block) {
    return this._owners.get(block) ?? [];
  }

  /** Tokens of a block that are written, as far as its owners tell. */
  numTokensIn(block) {
    const owners = this.ownersOf(block);
    const counts = owners.map(([sequence, index]) => sequence.numComputed - index * this._blockSize);
    return Math.max(0, Math.min(this._blockSize, Math.max(0, ...counts)));
  }

  redraw() {
    const width = this._canvas.parentElement.clientWidth;
    const numShown = this._states.length - 1;
    if (width <= 0 || numShown < 1) {
      this._canvas.style.height = "120px";
      return;
    }
    let cell = MAX_CELL;
    while (cell > MIN_CELL && Math.ceil(numShown / Math.floor(width / cell)) * cell > MAX_HEIGHT) cell--;
    this._cell = cell;
    this._columns = Math.max(1, Math.floor(width / cell));
    this._left = Math.floor((width - this._columns * cell) / 2);
    const height = Math.ceil(numShown / this._columns) * cell;
    const ratio = devicePixelRatio || 1;
    this._canvas.style.height = `${height}px`;
    this._canvas.width = Math.round(width * ratio);
    this._canvas.height = Math.round(height * ratio);
    this._context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this._drawn = [];
    const style = getComputedStyle(document.documentElement);
    this._colours = Object.fromEntries(["surface", "free", "cached", "owned", "shared", "transfer", "text"]
      .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this._isDark = document.documentElement.dataset.theme === "dark";
    this._hues = new Map();
    this._draw();
  }

  _draw() {
    if (!this._cell) return;
    for (let block = 1; block < this._states.length; block++) {
      const look = this._look(block);
      if (this._drawn[block] === look) continue;
      this._drawn[block] = look;
      this._drawBlock(block, look);
    }
  }

  /** What a block looks like, as a text that is equal when nothing has changed. */
  _look(block) {
    const state = this._states[block];
    const isPointed = block === this._pointed ? "!" : "";
    if (state !== OWNED && state !== SHARED) return `${state}${this._lit === null ? "" : "-"}${isPointed}`;
    const owners = this._owners.get(block) ?? [];
    const isLit = this._lit === null || owners.some(([sequence]) => sequence.id === this._lit);
    const ids = this._lit !== null && isLit ? this._lit : owners.slice(0, 2).map(([sequence]) => sequence.id).join(",");
    return `${state}:${ids}:${this.numTokensIn(block)}${isLit ? "" : "-"}${isPointed}`;
  }

  _drawBlock(block, look) {
    const context = this._context;
    const cell = this._cell;
    const index = block - 1;
    const x = this._left + (index % this._columns) * cell;
    const y = Math.floor(index / this._columns) * cell;
    const gap = cell > 14 ? 3 : cell > 7 ? 2 : cell > 3 ? 1 : 0;
    const size = cell - gap;
    const colours = this._colours;
    const state = this._states[block];
    context.globalAlpha = 1;
    context.fillStyle = colours.surface;
    context.fillRect(x, y, cell, cell);
    context.globalAlpha = look.includes("-") ? 0.22 : 1;
    const radius = size > 9 ? 3 : size > 5 ? 1.5 : 0;
    const fill = (colour, top = 0) => {
      context.fillStyle = colour;
      if (radius && top === 0) {
        context.beginPath();
        context.roundRect(x, y, size, size, radius);
        context.fill();
      } else {
        context.fillRect(x, y + top, size, size - top);
      }
    };
    if (state === OWNED || state === SHARED) {
      const owners = this.ownersOf(block);
      const share = size > 5 ? this.numTokensIn(block) / this._blockSize : 1;
      const paint = (alpha) => (this._byState
        ? (state === SHARED ? colours.shared : colours.owned)
        : sequenceColour(this._lit !== null && !look.includes("-") ? this._lit : owners[0]?.[0].id ?? 0, this._isDark, alpha));
      if (share < 1) {
        context.globalAlpha *= 0.35;
        fill(paint(1));
        context.globalAlpha /= 0.35;
        context.save();
        context.beginPath();
        context.rect(x, y + size * (1 - share), size, size * share);
        context.clip();
        fill(paint(1));
        context.restore();
      } else {
        fill(paint(1));
      }
      if (state === SHARED && !this._byState) this._drawSecondOwner(x, y, size, owners, radius);
    } else {
      fill({ [FREE]: colours.free, [CACHED]: colours.cached, [IN_TRANSFER]: colours.transfer }[state] ?? colours.surface);
    }
    context.globalAlpha = 1;
    if (look.endsWith("!")) {
      context.strokeStyle = colours.text;
      context.lineWidth = 1.5;
      context.strokeRect(x + 0.75, y + 0.75, Math.max(2, size - 1.5), Math.max(2, size - 1.5));
    }
  }

  /** A block of several sequences is cut in two: their first two colours. */
  _drawSecondOwner(x, y, size, owners, radius) {
    const context = this._context;
    context.save();
    if (radius) {
      context.beginPath();
      context.roundRect(x, y, size, size, radius);
      context.clip();
    }
    context.fillStyle = owners[1] ? sequenceColour(owners[1][0].id, this._isDark) : this._colours.text;
    context.beginPath();
    context.moveTo(x + size, y);
    context.lineTo(x + size, y + size);
    context.lineTo(x, y + size);
    context.fill();
    context.restore();
  }

  _at(x, y) {
    if (!this._cell) return -1;
    const column = Math.floor((x - this._left) / this._cell);
    const block = 1 + Math.floor(y / this._cell) * this._columns + column;
    return column >= 0 && column < this._columns && block >= 1 && block < this._states.length ? block : -1;
  }

  _onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this._columns, ArrowDown: this._columns };
    if (event.key === "Escape") this._point(-1);
    else if (event.key in steps && this._cell) {
      event.preventDefault();
      const next = this._pointed < 0 ? 1 : this._pointed + steps[event.key];
      if (next >= 1 && next < this._states.length) this._point(next);
    }
  }

  _point(block) {
    if (block === this._pointed) return;
    this._pointed = block;
    this._draw();
    this._tell();
  }

  _tell() {
    const block = this._pointed;
    const index = block - 1;
    if (block < 0) return this._onPoint(-1, 0, 0);
    const x = this._left + ((index % this._columns) + 0.5) * this._cell;
    return this._onPoint(block, x, (Math.floor(index / this._columns) + 1) * this._cell);
  }
}
