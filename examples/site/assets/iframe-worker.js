// A browser starts no worker for a page that it reads from the disk. The search then runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      inside.document.open();
      inside.document.write(`<script>
        var postMessage = (data) => parent.postMessage(data, "*");
        var importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((loaded) => {
          const script = document.createElement("script");
          script.src = url; script.onload = loaded; document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><body><script src="${url}"><\/script></body>`);
      this.ready = new Promise((resolve) => { inside.onload = resolve; });
      inside.document.close();
    }
    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }
    terminate() { this.frame.remove(); }
  };
}
