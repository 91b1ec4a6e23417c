-- After delivery by XREADGROUP: the groups of these entries become claimed.
-- Keys: ready stream, group:<id> hash, waiting zset, stats hash, tally hash.
-- ARGV: entry ids ...
-- Returns the group ids, in order, without those that are closed.
local groups = {}
for _, entry in ipairs(ARGV) do
  local group = take(entry)
  if group then groups[#groups + 1] = group end
end
return groups
