// Zooms a canvas by dragging or by keyboard (+ - arrows 0); a double click shows all.

const MIN_DRAG = 8; // pixels; a shorter drag is ignored

export class Zoom {
  // axis: {whole(), shown(): [low, high]; at(x): the value there, or null; zoomed(range or null); moved(event); left()}
  constructor(canvas, axis) {
    this.canvas = canvas;
    this.axis = axis;
    this.drag = null; // {from, to} in pixels
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => this.leave());
    canvas.addEventListener("pointerleave", () => !this.drag && this.leave());
    canvas.addEventListener("dblclick", () => this.to(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  // [left, right] of the selection in pixels, or null
  get marked() {
    return this.drag && Math.abs(this.drag.to - this.drag.from) > 2 ? [Math.min(this.drag.from, this.drag.to), Math.max(this.drag.from, this.drag.to)] : null;
  }

  press(event) {
    if (event.button !== 0 || this.axis.at(event.offsetX) === null) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { from: event.offsetX, to: event.offsetX };
  }

  move(event) {
    if (this.drag) this.drag.to = event.offsetX;
    this.axis.moved(event);
  }

  release(event) {
    const marked = this.marked;
    this.drag = null;
    if (marked && marked[1] - marked[0] > MIN_DRAG) this.to(marked.map((x) => this.axis.at(x)));
    else this.axis.moved(event);
  }

  leave() {
    this.drag = null;
    this.axis.left();
  }

  key(event) {
    const [low, high] = this.axis.shown();
    const wide = high - low;
    const moves = {
      "+": [low + wide / 4, high - wide / 4], "=": [low + wide / 4, high - wide / 4], "-": [low - wide / 2, high + wide / 2],
      ArrowLeft: [low - wide / 4, high - wide / 4], ArrowRight: [low + wide / 4, high + wide / 4], 0: null, Escape: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.to(moves[event.key]);
  }

  to(range) {
    if (range) {
      const [low, high] = this.axis.whole();
      const wide = Math.min(Math.max(range[1] - range[0], (high - low) / 1e5, 1e-9), high - low);
      const begin = Math.min(Math.max(range[0], low), high - wide);
      range = wide >= (high - low) * 0.999 ? null : [begin, begin + wide];
    }
    this.axis.zoomed(range);
  }
}
