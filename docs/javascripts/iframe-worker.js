// The search of a site that is opened from a disk. It runs in a worker, and browsers start none for file:// pages.
// So there a hidden frame takes the worker's place: it loads the same script, and events carry the messages.
// Material's offline plugin would load such a shim from unpkg.com; mkdocs.yml names this one instead.

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    this.inside = frame.contentWindow;
    this.inside.document.open(); // else Firefox replaces the empty document later, and with it what is added here
    this.inside.document.write("<body></body>");
    this.inside.document.close();
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = this.inside.document.createElement("script");
    this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
    script.src = url;
    this.inside.document.body.appendChild(script);
  }

  postMessage(data) {
    // A clone, as a worker would get: the page may change its own.
    const event = new MessageEvent("message", { data: structuredClone(data) });
    this.loaded.then(() => this.inside.dispatchEvent(event));
  }
}

if (location.protocol === "file:") {
  window.Worker = FrameWorker;
}
