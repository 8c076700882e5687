-- An open group: its hash, loaded into a table once in a call, changed there, and saved or ended. Fields of the hash:
--   'head'      '<role> <size> <bytes reserved for a free slot> <opened at, ms> <fencing epoch> <version> <data source>'
--   'slots'     the slot map, one character a slot:
--               '.'  free
--               'p'  pushed and on its way: in the rollouts stream or with a scorer
--               'u'  usable, with a reward
--               's'  usable, without a reward yet
--               'x'  ended otherwise (failed, cancelled, unscorable ...), and counted as dropped
--   'producer'  who plays it, '<name> <instance>': the last one to open it, push to it or touch it; '' = nobody, it does not
--               count in pacing
--   'holders'   nonces of those calls of `begin` whose callers have its tickets; none in a group that was opened otherwise
--   'round'     of an evaluation group that has one, its name
--   'shared'    what its rollouts share beyond that, for a gateway (`share`)
--   'columns'   of a group that has columns of its own: '<bytes> <payload key> <names>', or '<bytes>' while the server lacks them
-- and those of packets and scores (lib/complete), of cancellations, and of turns (lib/turns).
-- KEYS  open
local MAX_SLOTS = 8192
local MAX_HEAD = 1000  -- bytes: a data source has at most 200 characters
local MAX_HOLDERS = 200  -- characters of `holders`: from so many on no more are noted, and the group is never withdrawn

local MAX_DIGITS = 15  -- of a number of bytes

local function is_payload(key) return string.find(key, '}:payload:', 1, true) ~= nil end

local function head_of(group)
  return table.concat({group.role, group.size, group.slot_bytes, group.opened_ms, group.epoch, group.version,
    group.data_source}, ' ')
end

-- The group's table. `state` is 'open', 'none' (no such group is open), or 'broken': somebody has overwritten its hash.
local function load_group(id, hash)
  local f = redis.pcall('HMGET', hash, 'head', 'slots', 'producer', 'holders', 'columns', 'turned')
  if not (f.err or f[1] or f[2]) then return {id = id, hash = hash, state = 'none'} end
  local head = f[1] and #f[1] <= MAX_HEAD and f[1] or ''
  local slots, role, size, slot_bytes, opened_ms, epoch, version, data_source =
    f[2], string.match(head, '^(%l+) ([1-9]%d*) (%d+) (%d+) (%d+) (%d+) (.*)$')
  if slots and (#slots > MAX_SLOTS or string.find(slots, '[^.pusx]')) then slots = nil end
  local columns_bytes, columns_key, column_names
  if f[5] then
    columns_bytes, columns_key, column_names = string.match(f[5], '^(%d+) ?(%S*) ?(%S*)$')
    if not (columns_bytes and #columns_bytes <= MAX_DIGITS and (columns_key == '' or is_payload(columns_key))) then
      slots, columns_key = nil, nil
    end
  end
  local is_open = slots and role and tonumber(size) <= #slots
    and math.max(slot_bytes, opened_ms, epoch, version) < 2 ^ 53
  return {id = id, hash = hash, state = is_open and 'open' or 'broken', role = role == 'eval' and role or 'train',
    size = tonumber(size), slot_bytes = slot_bytes, opened_ms = opened_ms, epoch = epoch, version = version,
    data_source = data_source or '', slots = slots or nil, producer = f[3], holders = f[4], turned = f[6],
    columns_bytes = columns_bytes, columns_key = columns_key, column_names = column_names, changes = {},
    packets = {}, fields = {}, scores = {}}
end

-- The group has columns that the server does not have (yet): it cannot be complete.
local function lacks_columns(group) return group.columns_key == '' end

-- Note a change of the group's hash for `save_group`.
local function change(group, field, value)
  group.changes[#group.changes + 1] = field
  group.changes[#group.changes + 1] = value
end

local function save_group(group)
  if #group.changes > 0 then redis.call('HSET', group.hash, unpack(group.changes)) end
end

-- Nobody has the tickets of the group any more, and nobody has pushed to it.
local function is_withdrawn(group)
  return group.holders == '' and not string.find(group.slots, '[^.]')
end

-- The producer plays an open group, which counts in pacing (again).
local function play(group, producer)
  if group.producer == producer then return end
  if group.producer == '' then count('groups_abandoned', -1) end
  change(group, 'producer', producer)
  group.producer = producer
end
